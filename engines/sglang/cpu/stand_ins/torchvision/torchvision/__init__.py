from engines.sglang.cpu.absent import stand_in

stand_in("torchvision", version="0.0.0")

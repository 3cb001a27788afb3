from engines.sglang.cpu.absent import stand_in

stand_in("sgl_kernel", version="0.0.0")

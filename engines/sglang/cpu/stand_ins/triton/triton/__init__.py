from engines.sglang.cpu.absent import decorator, stand_in

stand_in(
    "triton",
    version="0.0.0",
    attributes={
        "triton": dict.fromkeys(("jit", "autotune", "heuristics", "Config"), decorator),
        "triton.language": {"constexpr": lambda value: value},
        "triton.knobs": {"runtime": None},
    },
)

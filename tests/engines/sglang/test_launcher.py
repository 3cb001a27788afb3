"""How SGLang is started: Python, environment, flags. Nothing of SGLang runs here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.sglang import launcher
from engines.sglang.cpu import absent, defaults
from engines.sglang.launcher import PYTHON_VARIABLE, CannotLaunch, LaunchOptions, command, environment_of, find_python

PYTHON = Path(sys.executable)


def flags_of(**given) -> dict[str, str]:
    parts = list(command(PYTHON, LaunchOptions(model="m", port=5, **given)))[3:]
    return {name: value for name, value in zip(parts, [*parts[1:], ""], strict=True) if name.startswith("--")}


def test_on_a_gpu_nothing_is_added_but_the_cache_report():
    assert flags_of() == {
        "--model-path": "m",
        "--host": "127.0.0.1",
        "--port": "5",
        "--enable-cache-report": "",
    }


def test_sglangs_own_flags_pass_through_and_come_last():
    built = command(PYTHON, LaunchOptions(model="m", flags=("--tp-size", "2", "--page-size=16")))
    assert built[-3:] == ["--tp-size", "2", "--page-size=16"]


def test_a_flag_that_is_given_is_not_added_a_second_time():
    built = command(PYTHON, LaunchOptions(model="m", device="cpu", flags=("--dtype=float32", "--sleep-on-idle")))
    assert not any(part in ("--dtype", "--kv-cache-dtype") for part in built)
    assert built.count("--sleep-on-idle") == 1


def test_on_a_cpu_results_do_not_wait_for_the_next_pass():
    assert "--disable-overlap-schedule" in command(PYTHON, LaunchOptions(model="m", device="cpu"))
    assert "--disable-overlap-schedule" not in command(PYTHON, LaunchOptions(model="m", device="cuda"))


@pytest.mark.parametrize(
    ("cpu_flags", "formats"),
    [
        ({"avx2"}, {"--dtype": "float32", "--kv-cache-dtype": "bfloat16"}),
        ({"avx2", "avx512_bf16"}, {"--dtype": "bfloat16"}),
        ({"amx_bf16"}, {"--dtype": "bfloat16"}),
    ],
)
def test_numbers_are_what_the_cpu_is_fast_with_and_the_kv_is_the_same_everywhere(monkeypatch, cpu_flags, formats):
    monkeypatch.setattr(defaults, "_cpu_flags", lambda: frozenset(cpu_flags))
    found = flags_of(device="cpu")
    assert {name: found[name] for name in found if "dtype" in name} == formats


def test_port_0_becomes_a_free_port():
    built = command(PYTHON, LaunchOptions(model="m"))
    assert int(built[built.index("--port") + 1]) > 0


def test_stand_ins_are_on_the_path_only_where_packages_are_missing(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    options = LaunchOptions(model="m", device="cpu")
    assert "PYTHONPATH" not in environment_of(options, ())
    with_one = environment_of(options, ("sgl_kernel",))
    assert with_one["PYTHONPATH"] == str(launcher.STAND_INS / "sgl_kernel")
    assert "TORCHDYNAMO_DISABLE" not in with_one
    assert environment_of(options, ("triton",))["TORCHDYNAMO_DISABLE"] == "1"


def test_on_a_gpu_sglang_is_not_told_that_it_is_on_a_cpu():
    assert "SGLANG_USE_CPU_ENGINE" not in environment_of(LaunchOptions(model="m"), ())


def test_a_model_folder_needs_no_hub(tmp_path):
    assert environment_of(LaunchOptions(model=str(tmp_path)), ())["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment_of(LaunchOptions(model="org/name"), ())


def test_transfers_stay_on_loopback_only_where_the_engine_does(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert environment_of(LaunchOptions(model="m"), ())["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in environment_of(LaunchOptions(model="m", host="10.0.0.1"), ())


def test_the_python_that_has_sglang_can_be_named(monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert find_python() == Path(sys.executable)
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(CannotLaunch, match="cannot be run"):
        find_python()


def test_without_sglang_the_remedy_is_named(monkeypatch):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(launcher, "find_spec", lambda _: None)
    with pytest.raises(CannotLaunch, match=PYTHON_VARIABLE):
        find_python()


USE = """
import triton, torchvision, sgl_kernel
import triton.language as tl
from triton.language.extra import libdevice
from torchvision.transforms.v2 import functional
from sgl_kernel.kvcacheio import transfer_kv

@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])
@triton.jit
def kernel(x: tl.constexpr): return x

class Mine(torchvision.transforms.Compose): pass

assert kernel(3) == 3
for call in (sgl_kernel.gemm, transfer_kv, triton.cdiv, functional.resize):
    try: call(1, 2)
    except NotImplementedError as error: assert "stand-in" in str(error)
    else: raise SystemExit(f"{call} answered")
print("fine")
"""


def test_stand_ins_can_be_imported_and_decorate_but_nothing_of_them_works():
    path = ":".join(str(launcher.STAND_INS / name) for name in absent.NAMES)
    ran = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, check=False, env={"PYTHONPATH": path}
    )
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr


def test_a_python_is_asked_which_packages_it_lacks():
    command_line = [sys.executable, "-m", "engines.sglang.cpu.absent"]
    answer = subprocess.run(command_line, capture_output=True, text=True, check=True).stdout
    assert set(json.loads(answer)) <= set(absent.NAMES)

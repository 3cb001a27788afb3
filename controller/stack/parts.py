"""What `trimtab up` runs: its options, and each part of the stack as a command line."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import engines.emulated
from controller.stack.supervise import READY_S, ChildSpec
from engines.observability import Observability

HOST = "127.0.0.1"
DRAIN_S = 3.0
"""How long running streams may go on after Ctrl-C: short, because the operator waits."""
RATE_PER_ENGINE = 1.5
TOKENIZER = Path(engines.emulated.__file__).parent / "tokenizer"
SGLANG_READY_S = 600.0
"""Two engines on a small and busy machine take minutes to start."""
SGLANG_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Port 0 takes a free one."""

    engines: int
    profile: str
    """What emulated engines are like."""
    port: int
    admin_port: int
    model_folder: Path | None = None
    """A model for SGLang engines; `None` runs emulated ones."""
    device: str = "cpu"
    """What SGLang engines run on. On a CPU each has a core to itself."""
    load: str | None = None
    """Name of a mix in `controller.stack.demo_load`; `None` sends nothing."""
    load_rate: float | None = None
    """Requests a second; `None` suits the number of engines."""
    api_key: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    """`None` makes one up."""
    redis_url: str | None = field(default=None, repr=False)
    """`None` starts one."""
    observability: Observability = field(default_factory=Observability)
    """What is not set here is left to each process."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the specs of one stack.

    Secrets travel by environment, where other users cannot see them; so does Redis's address, which may hold one.
    """

    options: StackOptions
    model: str
    admin_token: str = field(repr=False)
    redis_url: str = field(repr=False)

    def engines(self) -> Sequence[ChildSpec]:
        if self.options.model_folder is None:
            return [self._emulated(f"e{number}") for number in range(self.options.engines)]
        return [self._sglang(number, self.options.model_folder) for number in range(self.options.engines)]

    def _sglang(self, number: int, folder: Path) -> ChildSpec:
        engine_id = f"e{number}"
        flags = {"model": str(folder), "device": self.options.device, "engine-id": engine_id, "host": HOST}
        flags |= {"served-model-name": self.model}
        if self.options.device == "cpu":
            flags |= {"cores": str(_core(number))}
        return ChildSpec(
            f"engine-{engine_id}",
            _command("-m controller.cli engine sglang", flags),
            env={"TRIMTAB_SGLANG_REDIS_URL": self.redis_url, **self._observability("TRIMTAB_SGLANG_")},
            stop_s=SGLANG_STOP_S,
            ready_s=max(READY_S, SGLANG_READY_S),
        )

    def _emulated(self, engine_id: str) -> ChildSpec:
        flags = {"profile": self.options.profile, "engine-id": engine_id, "host": HOST}
        command = _command("-m engines.emulated", flags)
        env = {"TRIMTAB_ENGINE_REDIS_URL": self.redis_url, **self._observability("TRIMTAB_ENGINE_")}
        return ChildSpec(f"engine-{engine_id}", command, env=env)

    def controller(self) -> ChildSpec:
        command = _command("-m controller.cli controller", {"model": self.model, "host": HOST})
        secrets = {"TRIMTAB_ADMIN_TOKEN": self.admin_token, "TRIMTAB_REDIS_URL": self.redis_url}
        return ChildSpec("controller", command, self.options.admin_port, {**secrets, **self._observability("TRIMTAB_")})

    def router(self) -> ChildSpec:
        flags = {"model": self.model, "host": HOST, "tokenizer": str(self._tokenizer()), "drain-s": f"{DRAIN_S:g}"}
        command = _command("-m controller.cli router", flags)
        secrets = {**self._client_env(), "TRIMTAB_REDIS_URL": self.redis_url}
        env = {**secrets, **self._observability("TRIMTAB_")}
        return ChildSpec("router", command, self.options.port, env, stop_s=DRAIN_S + 5)

    def load(self, mix: str, url: str) -> ChildSpec:
        rate = self.options.load_rate or RATE_PER_ENGINE * self.options.engines
        flags = {"url": url, "model": self.model, "mix": mix, "rate": f"{rate:g}"}
        arguments = ["-m", "controller.cli", "load", *_flags(flags)]
        return ChildSpec("load", lambda _port, _ready: arguments, port=None, env=self._client_env())

    def _observability(self, prefix: str) -> Mapping[str, str]:
        given = self.options.observability.model_dump(exclude_unset=True)
        return {f"{prefix}{name.upper()}": str(value) for name, value in given.items()}

    def _tokenizer(self) -> Path:
        return self.options.model_folder or TOKENIZER

    def _client_env(self) -> Mapping[str, str]:
        return {} if self.options.api_key is None else {"TRIMTAB_API_KEY": self.options.api_key}


def _core(number: int) -> int:
    """The core of engine `number`: one each, as long as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)]


def _command(program: str, flags: Mapping[str, str]) -> Callable[[int, Path], Sequence[str]]:
    fixed = [*program.split(), *_flags(flags)]
    return lambda port, ready: [*fixed, "--port", str(port), "--ready-file", str(ready)]


def _flags(values: Mapping[str, str]) -> Sequence[str]:
    return [part for name, value in values.items() for part in (f"--{name}", value)]

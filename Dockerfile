# Trimtab's processes; which one is the command. Targets:
#   trimtab       router, controller, emulated engines, load (the last stage, so what a plain build makes)
#   sglang-cpu    SGLang on CPUs, with a small model in it
#   sglang-cuda   SGLang's published CUDA image, with the plugin
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md ./
COPY engines engines
COPY tuner tuner
COPY controller controller
RUN pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels .

FROM ${SGLANG_IMAGE} AS sglang-cuda
# Ubuntu's Python must be told that nobody else installs packages here.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /src
COPY requirements/sglang-cpu.lock requirements/sglang-cpu.lock
# Of what the plugin needs, what SGLang does not bring (names, as patterns); everything else stays as SGLang's image has it.
ARG PLUGIN_NEEDS="redis hiredis structlog tenacity pydantic-settings python-dotenv httptools opentelemetry-.* googleapis-common-protos"
RUN set -f; for name in ${PLUGIN_NEEDS}; do grep -i "^${name}==" requirements/sglang-cpu.lock || exit 1; done > requirements/plugin.lock \
    && python3 -m pip install --no-cache-dir --disable-pip-version-check --no-deps -r requirements/plugin.lock
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl
RUN useradd --uid 10001 --user-group --home-dir /var/cache/trimtab --create-home trimtab
USER 10001:10001
WORKDIR /var/cache/trimtab
# Weights, and what is compiled for this GPU: kept in a volume, the rest of the root may be read-only.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/var/cache/trimtab
ENV TORCHINDUCTOR_CACHE_DIR=/var/cache/trimtab/inductor TRITON_CACHE_DIR=/var/cache/trimtab/triton
ENTRYPOINT ["trimtab"]
CMD ["engine", "sglang", "--help"]

FROM ${PYTHON_IMAGE} AS sglang-cpu
WORKDIR /src
COPY requirements/sglang-cpu.lock requirements/sglang-cpu.lock
# Where the package index gives the CUDA build of torch: --extra-index-url <an index with the CPU build>
ARG SGLANG_PIP_ARGS=""
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps ${SGLANG_PIP_ARGS} -r requirements/sglang-cpu.lock \
    && { python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' \
        || { echo "torch is not its CPU build: say where that is with SGLANG_PIP_ARGS (see .env.example)"; exit 1; }; }
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl
RUN TQDM_DISABLE=1 python -m engines.sglang.model_folder /models/smollm2-135m \
    && chmod -R a+rX /models
RUN useradd --uid 10001 --user-group --no-create-home trimtab
USER 10001:10001
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
ENTRYPOINT ["trimtab"]
CMD ["engine", "sglang", "--help"]

FROM ${PYTHON_IMAGE} AS trimtab
WORKDIR /src
# What changes rarely comes first, so that a change of code does not install all dependencies again.
COPY requirements/base.lock requirements/base.lock
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements/base.lock
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl
RUN useradd --uid 10001 --user-group --no-create-home trimtab \
    && install --directory --owner=trimtab --group=trimtab /var/cache/trimtab
USER 10001:10001
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Numba wants to keep what it compiles somewhere it may write.
ENV NUMBA_CACHE_DIR=/tmp/numba
ENTRYPOINT ["trimtab"]
CMD ["--help"]

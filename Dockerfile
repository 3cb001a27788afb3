# Every trimtab process; which one is the command: router, controller, engine emulated.
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE}

WORKDIR /src
# What changes rarely comes first, so that a change of code does not install all dependencies again.
COPY requirements/base.lock requirements/base.lock
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements/base.lock
COPY pyproject.toml README.md ./
COPY engines engines
COPY tuner tuner
COPY controller controller
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps .

RUN useradd --system --uid 10001 --user-group --no-create-home trimtab
USER 10001:10001
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Numba wants to keep what it compiles somewhere it may write.
ENV NUMBA_CACHE_DIR=/tmp/numba
ENTRYPOINT ["trimtab"]
CMD ["--help"]

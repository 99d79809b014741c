# rlhf-engine on CPUs:  docker build --file docker/cpu.Dockerfile --tag rlhf-engine:cpu .
# VERSION is what the image calls itself; without git's tags nothing better is known than the default.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY bench/rlhf_bench bench/rlhf_bench
COPY csrc csrc
COPY kernels kernels
COPY rlhf_engine rlhf_engine
ARG VERSION=0.0+unknown
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLHF_ENGINE="$VERSION" pip wheel --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
ARG EXTRAS=data,rewards
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$(echo /wheels/*.whl)[$EXTRAS]"
RUN useradd --create-home engine
USER engine
WORKDIR /home/engine
# an image without native code would only be slow, and nobody would see why
RUN rlhf-engine doctor | grep "native C++ extension: available"
ENTRYPOINT ["rlhf-engine"]
CMD ["--help"]

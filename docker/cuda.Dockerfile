# rlhf-engine on GPUs:  docker build --file docker/cuda.Dockerfile --tag rlhf-engine:cuda .
# The base has nvcc, which compiles the CUDA kernels when they are first used, and g++, which Triton needs at run time.
# torch comes from PyPI with CUDA libraries of its own; the driver of the machine has to serve both.
ARG CUDA=13.0.2

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS base
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/engine
ENV PATH=/opt/engine/bin:$PATH

FROM base AS build
WORKDIR /source
COPY CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY bench/rlhf_bench bench/rlhf_bench
COPY csrc csrc
COPY kernels kernels
COPY rlhf_engine rlhf_engine
ARG VERSION=0.0+unknown
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLHF_ENGINE="$VERSION" pip wheel --no-deps --wheel-dir /wheels .

FROM base
ARG EXTRAS=data,rewards
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[$EXTRAS]"
RUN useradd --create-home engine
USER engine
WORKDIR /home/engine
# an image without native code would only be slow, and nobody would see why
RUN rlhf-engine doctor | grep "native C++ extension: available"
ENTRYPOINT ["rlhf-engine"]
CMD ["--help"]

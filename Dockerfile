# threepo with its sandbox, for CPUs:
#   docker build --tag threepo .
# for NVIDIA GPUs, on an image with Python 3.11 or newer, with torch and vLLM as PyPI has them, and what Triton compiles with:
#   docker build --tag threepo:cuda --build-arg BASE=nvidia/cuda:12.9.1-runtime-ubuntu24.04 \
#     --build-arg TORCH_INDEX= --build-arg EXTRAS=[vllm] --build-arg MORE="gcc libc6-dev python3-dev" .
# Runs are written where you are:
#   docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" threepo train my_run.toml
# The code sandbox needs `--security-opt seccomp=unconfined`, with AppArmor `--security-opt apparmor=unconfined` too
# (docs/rewards.md); `docker run --rm threepo doctor` says whether it works.
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/threepo
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE constraints.txt ./
COPY src src
COPY recipes recipes
RUN /opt/threepo/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX" --constraint constraints.txt} \
    ".${EXTRAS}"

FROM ${BASE}
ARG MORE=
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap libc-bin libgomp1 libseccomp2 python3 ${MORE} \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 threepo \
    && install --directory --owner threepo /work
COPY --from=build /opt/threepo /opt/threepo
# HOME is where caches go, so that they stay, whoever the user is.
ENV PATH=/opt/threepo/bin:$PATH HOME=/work
USER 10001
WORKDIR /work
ENTRYPOINT ["threepo"]
CMD ["doctor"]

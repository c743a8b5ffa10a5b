# Builds the wheel, installs it, and runs `stronghold test`:
#   docker build -t stronghold . && docker run --rm --gpus all --ulimit memlock=-1 stronghold
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# Triton compiles a launcher with the C compiler when a program first uses the GPU.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# DeepSpeed compiles none of its operators: stronghold does not use them.
RUN DS_BUILD_OPS=0 pip install --no-cache-dir -c /wheels/constraints.txt /wheels/*.whl \
    && rm -r /wheels
WORKDIR /work
CMD ["stronghold", "test"]

# flatness for people without a Python of their own, on a CPU:
#
#     docker build -t flatness .
#     docker run --rm -v "$PWD:/work" flatness demo
#     docker run --rm -v "$PWD:/work" flatness measure net.pt --model mynets:build --data digits --out results
#
# What the container reads and writes is the current folder.
FROM python:3.12-slim

# torch's own index has builds without CUDA: 200 MB in place of several GB.
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu

COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir /source && rm -rf /source

WORKDIR /work
ENTRYPOINT ["flatness"]
CMD ["--help"]

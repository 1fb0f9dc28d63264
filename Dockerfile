# flatness for a CPU, for people who have no Python:
#
#     docker build -t flatness .
#     docker run --rm -v "$PWD:/work" flatness demo
#     docker run --rm -v "$PWD:/work" flatness measure net.pt --model mynets:build --data digits --out results
#
# The container reads and writes in the current folder.
FROM python:3.12-slim

# torch's own index has builds without CUDA: 200 MB instead of several GB.
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu

COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir /source && rm -rf /source

WORKDIR /work
ENTRYPOINT ["flatness"]
CMD ["--help"]

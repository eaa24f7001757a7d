# Serves the bundle that is mounted at /model, on port 8000, on the CPU.
FROM python:3.12-slim
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[serve,export]' && useradd --create-home --uid 10001 confitune
USER confitune
WORKDIR /home/confitune
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz')"]
ENTRYPOINT ["confitune", "serve", "/model", "--host", "0.0.0.0", "--device", "cpu"]

# vLLM's image with profilemate in it. Switch it off with -e VLLM_PROFILING=0.
FROM vllm/vllm-openai:v0.32.0
COPY --from=profilemate-inject:3.12 /profilemate /opt/profilemate
ENV PYTHONPATH=/opt/profilemate

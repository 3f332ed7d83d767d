# SPDX-License-Identifier: Apache-2.0
"""Which options of vLLM's have values that may be written down, and which values?

The names are those of vLLM 0.8.5 to 0.33, without dashes in front. What is missing here is ``***``
in a session: a new option costs its value until it is added.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NUMBERS = _words(
    """
    api-server-count batch-size block-size cp-kv-cache-interleave-size cpu-offload-gb
    cudagraph-capture-sizes cuda-graph-sizes custom-histogram-buckets data-parallel-rank
    data-parallel-rpc-port data-parallel-size data-parallel-size-local data-parallel-start-rank
    data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
    dcp-kv-cache-interleave-size decode-context-parallel-size device-memory-utilization
    distributed-timeout-seconds cpu-distributed-timeout-seconds
    dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s dp-sync-interval elastic-ep-max-dp-size expert-parallel-size
    gpu-memory-utilization grpc-port h11-max-header-count h11-max-incomplete-event-size input-len
    kv-cache-memory-bytes kv-cache-metrics-sample kv-offloading-size long-prefill-token-threshold
    lora-extra-vocab-size mamba-block-size mamba-cache-philox-rounds master-port max-concurrency
    max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs max-long-partial-prefills
    max-lora-rank max-loras max-model-len max-num-active-seqs max-num-batched-tokens
    max-num-partial-prefills max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens
    max-num-seqs max-parallel-loading-workers max-seq-len-to-capture max-tokens
    mm-encoder-fp8-scale-save-margin mm-ipc-gpu-memory-gb mm-processor-cache-gb
    mm-shm-cache-max-object-size-mb nnodes node-rank num-gpu-blocks-override num-iters
    num-iters-warmup num-lookahead-slots num-prompts num-scheduler-steps num-speculative-tokens
    offload-group-size offload-num-in-group offload-prefetch-step output-len pipeline-parallel-size
    port prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval
    prefix-match-unit random-input-len random-output-len random-prefix-len renderer-num-workers
    replayssm-buffer-len request-rate rope-theta safetensors-prefetch-block-size
    safetensors-prefetch-num-threads seed shutdown-timeout spec-tokens sse-keep-alive-interval
    ssl-cert-reqs stream-interval swap-space temperature tensor-parallel-size ubatch-size
    video-pruning-rate watermark
    """
)

FLAGS = _words(
    """
    aggregate-engine-logging allow-credentials allow-deprecated-quantization async-engine
    async-scheduling calculate-kv-scales cohere-is-reasoning-model cudagraph-metrics
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
    dcp-q-replicate disable-async-output-proc disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-detokenize disable-fastapi-docs
    disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-log-requests
    disable-log-stats disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization
    disable-sliding-window disable-uvicorn-access-log enable-auto-tool-choice
    enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo
    enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel
    enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
    enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-log-deltas
    enable-log-outputs enable-log-requests enable-logging-iteration-details enable-lora
    enable-lora-bias enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint
    enable-metrics enable-mfu-metrics enable-mixed-moe-lora-format enable-mm-embeds
    enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs enable-per-request-metrics
    enable-prefix-caching enable-prompt-adapter enable-prompt-embeds enable-prompt-tokens-details
    enable-reasoning enable-request-id-headers enable-return-routed-experts enable-scale-out
    enable-server-load-tracking enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh
    enable-tokenizer-info-endpoint enable-tower-connector-lora enable-trace-replay enforce-eager
    exclude-tools-when-tool-choice-none fail-on-environ-validation fully-sharded-loras grpc headless
    help ignore-eos interleave-mm-strings jit-monitor-verbose kv-cache-metrics
    kv-sharing-fast-prefill language-model-only log-error-stack
    long-prefill-token-threshold-adaptive mm-device-do-normalize mm-encoder-only
    multi-step-stream-outputs numa-bind profile ray-workers-use-nsight return-sampling-mask
    return-tokens-as-token-ids scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph specialize-active-lora swa-bounded-replay tokens-only
    trust-remote-code trust-request-chat-template trust-request-mm-kwargs use-fp64-gumbel
    use-replayssm use-tqdm-on-load use-v2-block-manager version worker-use-ray
    """
)
"""Options without a value."""

CHOICES = _words(
    """
    all2all-backend anthropic-disabled-thinking-effort attention-backend backend
    chat-template-content-format collect-detailed-traces config-format convert data-parallel-backend
    dataset-name dcp-comm-backend device distributed-executor-backend dtype
    expert-placement-strategy fingerprint-mode gdn-prefill-backend guided-decoding-backend host
    jit-monitor-mode kda-decode-backend kda-prefill-backend kv-cache-dtype
    kv-cache-dtype-skip-layers kv-offloading-backend linear-backend load-format log-level
    logprobs-mode lora-dtype mamba-backend mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype
    mamba-ssu-algorithm mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-tp-mode
    mm-hasher-algorithm mm-processor-cache-type mm-processor-device mm-tensor-ipc model-impl
    moe-backend offload-backend optimization-level per-request-spec-decode-metrics performance-mode
    preemption-mode prefix-caching-hash-algo quantization runner safetensors-load-strategy
    scheduling-policy sparse-indexer-topk-backend spec-method task tokenizer-mode tool-strict-level
    uvicorn-log-level video-pruning-method
    """
)
"""Options whose value is one of ``WORDS``, or a number."""

NAMES = _words(
    """
    config hf-config-path model served-model-name spec-model speculative-model tokenizer
    """
)
"""Options whose value is a model's name, or a path."""

OBJECTS = _words(
    """
    attention-config aux-output-config compilation-config diffusion-config ec-manager-config
    engram-config eplb-config fault-tolerance-config hf-overrides ir-op-priority kernel-config
    kv-transfer-config limit-mm-per-prompt override-generation-config override-pooler-config
    pooler-config rope-scaling speculative-config structured-outputs-config
    """
)
"""Options whose value is JSON."""

SHORT = {
    "-O": "compilation-config",
    "-ac": "attention-config",
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-dc": "diffusion-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpb": "data-parallel-backend",
    "-dpe": "data-parallel-external-lb",
    "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel",
    "-h": "help",
    "-n": "nnodes",
    "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
    "-v": "version",
}

SEVERAL = _words(
    """
    collect-detailed-traces cuda-graph-sizes cudagraph-capture-sizes custom-histogram-buckets
    kv-cache-dtype-skip-layers served-model-name
    """
)
"""Options that take several values."""

KEYS = _words(
    """
    alpha attention_backend attention_factor attn_temperature audio backend backend_per_kind
    beta_fast beta_slow block_size canvas_length communicator compile_mm_encoder
    compile_ranges_endpoints compile_sizes cudagraph_capture_sizes cudagraph_copy_inputs
    cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups
    cudagraph_specialize_lora custom_ops decoder_replay_cudagraph_capture_sizes
    decoder_replay_trim_threshold device_buffer_size dimensions disable_additional_properties
    disable_any_whitespace disable_by_batch_size disable_eagle_block_drop
    disable_flashinfer_q_quantization disable_padded_drafter_batch draft_sample_method
    draft_tensor_parallel_size dspark_draft_topk eager_host_mirror eliminate_noops
    embedding_across_dp enable_adaptive_verification enable_attn_fusion enable_chunked_processing
    enable_cutedsl_warmup enable_flashinfer_autotune enable_fusion enable_jit_warmup
    enable_kv_cache_events enable_noop enable_permute_local_kv enable_qk_norm_rope_fusion
    enable_sequence_parallelism encoder_cudagraph_token_budgets enforce_eager extrapolation_factor
    factor fast_moe_cold_start fi_allreduce_fusion_max_size_mb
    flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m flex_attn_block_n
    flex_attn_kv_block_size flex_attn_q_block_size full_cuda_graph fuse_act_padding fuse_act_quant
    fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms fuse_mla_dual_rms_norm fuse_norm_quant
    fuse_qk_norm_rope_kvcache fuse_rope_kvcache fuse_rope_kvcache_cat_mla head_dim high_freq_factor
    hidden_size image indexer_kv_dtype indexer_sparse_logits intermediate_size ir_enable_torch_wrap
    kv_buffer_device kv_buffer_size kv_cache_dtype kv_connector kv_load_failure_policy
    kv_parallel_size kv_rank kv_role layer_types level linear_backend log_balancedness
    log_balancedness_interval long_factor low_freq_factor max_bytes max_cudagraph_capture_size
    max_denoising_steps max_embed_len max_model_len max_new_tokens max_position_embeddings method
    min_p mla_prefill_backend mode model model_type moe_backend mrope_section mscale mscale_all_dim
    num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads
    num_lookahead_slots num_redundant_experts num_speculative_tokens
    num_speculative_tokens_per_batch_size original_max_position_embeddings parallel_drafting
    partial_rotary_factor pass_config policy pooling_type posterior_alpha posterior_threshold
    prompt_lookup_max prompt_lookup_min quantization rejection_sample_method repetition_penalty
    rope_parameters rope_scaling rope_theta rope_type rope_kvcache_fusion_max_token_num
    seq_pooling_type short_factor sliding_window sparse_indexer_topk_backend sparse_mla_force_mqa
    sparse_mla_prefill_workspace_factor splitting_ops step_interval
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_max_tree_depth suffix_decoding_min_token_prob synthetic_acceptance_length
    synthetic_acceptance_rates task temperature tensor_parallel_size text_config tok_pooling_type
    tokenspeed_mla_min_split_kv top_k top_p tq_max_kv_splits_for_cuda_graph truncate type
    use_activation use_async use_cudagraph use_heterogeneous_vocab use_inductor
    use_inductor_graph_partition use_local_argmax_reduction use_non_causal
    use_prefill_query_quantization use_thp use_trtllm_attention video vision window_size
    """
)
"""Keys of such JSON whose values may be written down: numbers, and words of ``WORDS``."""

NAME_KEYS = frozenset(("model",))
"""Of ``KEYS``, those whose value is a model's name, or a path."""

WORDS = _words(
    """
    0.0.0.0 127.0.0.1 :: localhost true false none null auto default all custom cpu cuda gpu tpu xpu
    rocm hpu neuron a2a ag_rs aiter aiter_flydsl aiter_mega_moe aiter_triton_mxfp4_bf16 align
    allgather_reducescatter b12x balanced batched_triton classify conch cooperative cutedsl cutlass
    data deep_gemm deep_gemm_mega_moe deep_select deepep_high_throughput deepep_low_latency
    deepep_v2 direct_rpc eager emulation exllama fbgemm flashinfer_all2allv flashinfer_b12x
    flashinfer_cudnn flashinfer_cutedsl flashinfer_cutlass flashinfer_moe_ep_cutedsl
    flashinfer_moe_ep_mega_deep_gemm flashinfer_nvlink_one_sided flashinfer_nvlink_two_sided
    flashinfer_trtllm flashkda flydsl function fused hash full high horizontal hpc humming
    interactivity lazy linear lmcache low lru machete marlin max medium model moonep
    mori_high_throughput mori_low_latency naive native nixl_ep openai parameter per_row persistent
    pplx prefetch rdna3 round_robin shm simple string summary detailed throughput torch torch_shm
    triton triton_unfused uva vertical evs vidcom2 weights worker xhigh xpu_woq auto_float bfloat16
    float float16 float32 half fp8 fp8_ds_mla fp8_e4m3 fp8_e5m2 fp8_inc fp8_per_token_head
    int4_per_token_head int8 int8_per_token_head nvfp4 nvfp4_4over6 nvfp4_ds_mla turboquant_3bit_nc
    turboquant_4bit_nc turboquant_k3v4_nc turboquant_k8v4 ultraquant_4bit aqlm auto_awq auto_gptq
    auto-round awq awq_marlin bitblas bitsandbytes compressed-tensors deepseek_v4_fp8 deepspeedfp
    experts_int8 fbgemm_fp8 fp8_per_block fp8_per_channel fp8_per_tensor fp_quant gguf gpt_oss_mxfp4
    gptq gptq_bitblas gptq_marlin gptq_marlin_24 hqq inc int8_per_channel_weight_only ipex modelopt
    modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 mxfp8 nvfp4_per_token online
    petit_nvfp4 ptpc_fp8 quark rtn torchao tpu_int8 debug error info trace warn warning critical
    notset blake3 builtin sha256 sha256_cbor sha256_cbor_64bit sha512 xxhash xxhash_cbor fcfs
    priority draft generate pooling embed embedding score reward transcription transformers vllm
    terratorch hf slow mistral deepseek_v32 processed_logits processed_logprobs raw_logits
    raw_logprobs bailing_hybrid_mtp bailing_hybrid_v3_mtp custom_class deepseek_mtp dflash
    dots3_note_mtp draft_model dspark eagle eagle3 ernie_mtp exaone4_5_mtp exaone_moe_mtp
    extract_hidden_states gemma4_mtp glm4_moe_lite_mtp glm4_moe_mtp glm5_next_mtp glm_ocr_mtp
    hy_v3_mtp hy_v4_mtp inkling_mtp kimi_k3_mtp longcat_flash_mtp medusa mimo_mtp mimo_v2_mtp
    minimax_m3_mtp mlp_speculator mtp nemotron_h_mtp ngram ngram_gpu pangu_ultra_moe_mtp qwen3_5_mtp
    qwen3_next_mtp qwen4_exp_mtp step3p5_mtp suffix amx_mla cpu_attn cpu_mla cutlass_mla flash_attn
    flash_attn_mla flashinfer flashinfer_mla flashmla flashmla_sparse flex_attention gdn_attn
    hpc_attn mamba1 mamba2 no_attention rocm_aiter_fa rocm_aiter_mla rocm_aiter_unified_attn
    rocm_attn rocm_flash short_conv torch_sdpa tree_attn triton_attn triton_mla turboquant
    ultraquant xformers xpu_mla_sparse full_and_piecewise full_decode_only piecewise
    stock_torch_compile dynamo_trace_once vllm_compile inductor rms_norm silu_and_mul quant_fp8
    rotary_embedding yarn llama3 longrope dynamic mrope deepseek_yarn full_attention
    sliding_attention linear_attention sliding_window kv_both kv_consumer kv_producer fail recompute
    swap decodebenchconnector exampleconnector lmcacheconnectorv1 lmcachempconnector
    mooncakeconnector multiconnector nixlconnector offloadingconnector p2pncclconnector
    pyncclconnector sharedstorageconnector simplecpuoffloadconnector ray mp uni external_launcher
    spawn dummy fastsafetensors instanttensor npcache pt runai_streamer runai_streamer_sharded
    safetensors sharded_state tensorizer xgrammar guidance outlines lm-format-enforcer random
    sharegpt sonnet burstgpt prefix_repetition vllm-chat openai-chat cls last mean step standard
    probabilistic strict greedy
    """
)
"""In small letters. They mean the same wherever they stand, and are no secrets."""

COMMANDS = _words(
    """
    bench chat collect-env complete latency launch mteb render run-batch serve startup sweep
    throughput vllm python python3
    """
)
"""Words of a command line that are neither an option nor its value."""

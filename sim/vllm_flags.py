"""The flags of `vllm serve` 0.22.0: what each takes, so that a pasted command line can be taken apart.

Names are written with underscores. Flags that only neighbouring releases have stand here too where they have
nothing to do with scheduling: a line that worked somewhere shall not fail over its chat template.
"""

from __future__ import annotations

from enum import Enum


class Takes(Enum):
    """What follows a flag."""

    NOTHING = "no value; --no-FLAG turns it off"
    ONE = "one value"
    MANY = "one value or more"
    MAYBE = "one value or none"
    JSON = "a JSON object, or --FLAG.key value"


_NOTHING = """
    aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling calculate_kv_scales
    cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    dcp_q_replicate disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_nccl_for_dp_synchronization disable_sliding_window disable_uvicorn_access_log enable_auto_tool_choice
    enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep
    enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune
    enable_flash_late_interaction enable_force_include_usage enable_layerwise_nvtx_tracing enable_log_deltas
    enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora enable_mfu_metrics
    enable_mm_embeds enable_mm_processor_stats enable_nccl_comm_suspend enable_offline_docs
    enable_per_request_metrics enable_prefix_caching enable_prompt_embeds enable_prompt_tokens_details
    enable_request_id_headers enable_return_routed_experts enable_server_load_tracking enable_sleep_mode
    enable_ssl_refresh enable_tokenizer_info_endpoint enable_tower_connector_lora enforce_eager
    exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc headless
    interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill language_model_only log_error_stack
    mm_encoder_only numa_bind ray_workers_use_nsight return_tokens_as_token_ids scheduler_reserve_full_isl
    skip_mm_profiling skip_tokenizer_init specialize_active_lora tokens_only trust_remote_code
    trust_request_chat_template use_fp64_gumbel use_tqdm_on_load
"""

_ONE = """
    all2all_backend allowed_headers allowed_local_media_path allowed_methods allowed_origins api_server_count
    attention_backend block_size chat_template chat_template_content_format code_revision config config_format
    convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb data_parallel_address
    data_parallel_backend data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
    data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size decode_context_parallel_size disable_access_log_for_endpoints
    distributed_executor_backend distributed_timeout_seconds download_dir dtype expert_placement_strategy
    gdn_prefill_backend generation_config gpu_memory_utilization h11_max_header_count
    h11_max_incomplete_event_size hf_config_path host io_processor_plugin kv_cache_dtype kv_cache_memory_bytes
    kv_cache_metrics_sample kv_offloading_backend kv_offloading_size linear_backend load_format log_config_file
    logits_processor_pattern logprobs_mode long_prefill_token_threshold lora_dtype mamba_backend mamba_block_size
    mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_log_len max_logprobs max_long_partial_prefills max_lora_rank max_loras
    max_model_len max_num_batched_tokens max_num_partial_prefills max_num_scheduled_tokens max_num_seqs
    max_parallel_loading_workers middleware mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb
    mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_impl moe_backend nnodes
    node_rank num_gpu_blocks_override offload_backend offload_group_size offload_num_in_group
    offload_prefetch_step optimization_level otlp_traces_endpoint override_attention_dtype performance_mode
    pipeline_parallel_size port prefill_context_parallel_size prefix_caching_hash_algo pt_load_map_location
    quantization reasoning_parser reasoning_parser_plugin renderer_num_workers response_role revision root_path
    runner safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_cls scheduling_policy seed show_hidden_metrics_for_version shutdown_timeout spec_method spec_model
    spec_tokens ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile stream_interval swap_space task
    tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tool_call_parser tool_parser_plugin
    tool_server ubatch_size uds uvicorn_log_level video_pruning_rate worker_cls worker_extension_cls
"""

_MANY = """
    allowed_media_domains api_key collect_detailed_traces cpu_offload_params cudagraph_capture_sizes device_ids
    ignore_patterns kv_cache_dtype_skip_layers logits_processors lora_modules lora_target_modules numa_bind_cpus
    numa_bind_nodes offload_params served_model_name
"""

_MAYBE = "hf_token"

_JSON = """
    additional_config attention_config compilation_config default_chat_template_kwargs default_mm_loras
    ec_transfer_config eplb_config fault_tolerance_config hf_overrides ir_op_priority kernel_config
    kv_events_config kv_transfer_config limit_mm_per_prompt mamba_config media_io_kwargs mm_processor_kwargs
    model_class_overrides model_loader_extra_config override_generation_config pooler_config profiler_config
    quantization_config reasoning_config speculative_config structured_outputs_config weight_transfer_config
"""

FLAGS: dict[str, Takes] = {
    name: takes
    for takes, names in (
        (Takes.NOTHING, _NOTHING),
        (Takes.ONE, _ONE),
        (Takes.MANY, _MANY),
        (Takes.MAYBE, _MAYBE),
        (Takes.JSON, _JSON),
    )
    for name in names.split()
}
"""Name with underscores -> what it takes."""

SHORT: dict[str, str] = {
    "ac": "attention_config",
    "asc": "api_server_count",
    "cc": "compilation_config",
    "dcp": "decode_context_parallel_size",
    "dp": "data_parallel_size",
    "dpa": "data_parallel_address",
    "dpb": "data_parallel_backend",
    "dpe": "data_parallel_external_lb",
    "dph": "data_parallel_hybrid_lb",
    "dpl": "data_parallel_size_local",
    "dpn": "data_parallel_rank",
    "dpp": "data_parallel_rpc_port",
    "dpr": "data_parallel_start_rank",
    "ep": "enable_expert_parallel",
    "n": "nnodes",
    "O": "optimization_level",
    "pcp": "prefill_context_parallel_size",
    "pp": "pipeline_parallel_size",
    "q": "quantization",
    "r": "node_rank",
    "tp": "tensor_parallel_size",
}
"""Flags with a single dash -> their name."""


def spelled(name: str) -> str:
    """The flag as it is typed: `max_num_seqs` -> `--max-num-seqs`."""
    return f"--{name.replace('_', '-')}"

"""The places where SGLang is made to call kvprov."""

from __future__ import annotations

from kvprov.engines.seams import Seam, Seams


def all_seams() -> tuple[Seam, ...]:
    """Return the seams, in the order in which they are put into effect."""
    from kvprov.engines import loading
    from kvprov.engines.sglang import adapters, media, paths, requests, scheduler, storage, updates, weights

    managers, cache = "sglang.srt.managers", "sglang.srt.mem_cache"
    request, updater = f"{managers}.schedule_batch", f"{managers}.scheduler_components.weight_updater"
    loader, files = "sglang.srt.model_loader.loader", ("hf_weights_files",)
    scheduling, manager = f"{managers}.scheduler", "SchedulerWeightUpdaterManager"
    asked = ("self", "recv_req")
    return (
        Seam(scheduling, "Scheduler.__init__", ("self", "server_args", "port_args"), scheduler.wrap_init),
        Seam(scheduling, "Scheduler._prefetch_kvcache", ("self", "req"), storage.wrap_prefetch),
        Seam(scheduling, "Scheduler.handle_rpc_request", asked, updates.wrap_rpc),
        Seam(scheduling, "Scheduler.handle_update_weight_version", asked, updates.wrap_weight_version),
        Seam(request, "Req.__init__", ("self", "rid", "origin_input_text", "origin_input_ids"), requests.wrap_init),
        Seam(request, "Req.init_next_round_input", ("self", "tree_cache"), requests.wrap_init_next_round_input),
        Seam(request, "Req.build_rebootstrap_payload", ("self",), requests.wrap_rebootstrap_payload),
        Seam(request, "Req.extend_image_inputs", ("self", "image_inputs"), media.wrap_extend_image_inputs),
        Seam(request, "MultimodalInputs.from_processor_output", ("obj",), media.wrap_from_processor_output),
        Seam("sglang.srt.session.session_controller", "Session.create_req", ("self", "req"), media.wrap_create_req),
        Seam(
            "sglang.srt.lora.lora",
            "LoRAAdapter._process_weight",
            ("self", "name", "loaded_weight"),
            adapters.wrap_process_weight,
        ),
        Seam("sglang.srt.lora.lora", "LoRAAdapter._normalize_weights", ("self",), adapters.wrap_normalize_weights),
        Seam(
            f"{cache}.storage.backend_factory",
            "StorageBackendFactory.create_backend",
            ("cls", "backend_name", "storage_config", "mem_pool_host"),
            paths.wrap_create_backend,
        ),
        Seam(
            f"{managers}.cache_controller",
            "HiCacheController.attach_storage_backend",
            ("self", "storage_backend", "prefetch_threshold", "model_name", "storage_backend_extra_config"),
            storage.wrap_attach,
        ),
        Seam(
            f"{managers}.cache_controller",
            "HiCacheController._generate_storage_config",
            ("self", "model_name", "storage_backend_extra_config"),
            storage.wrap_generate_storage_config,
        ),
        Seam(
            f"{cache}.unified_radix_cache",
            "UnifiedRadixCache.write_backup_storage",
            ("self", "node_id"),
            storage.wrap_write_backup_storage,
        ),
        *(
            Seam(updater, f"{manager}.update_weights_from_{source}", asked, updates.wrap_update(source))
            for source in ("disk", "tensor", "distributed", "ipc")
        ),
        Seam(updater, f"{manager}.release_memory_occupation", asked, updates.wrap_release_memory),
        Seam(updater, f"{manager}.check_weights", asked, updates.wrap_check_weights),
        Seam(updater, f"{manager}.begin_weight_update", asked, updates.wrap_begin, optional=True),
        Seam(updater, f"{manager}.end_weight_update", asked, updates.wrap_end, optional=True),
        Seam(
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            "WeightUpdater.update_weights_from_disk",
            ("self", "model_path", "load_format"),
            weights.wrap_update_from_disk,
        ),
        Seam(
            loader, "DefaultModelLoader.load_model", ("self", "model_config", "device_config"), weights.wrap_load_model
        ),
        Seam(loader, "DefaultModelLoader.commit_model_weights", ("self",), weights.wrap_commit_model_weights),
        Seam(loader, "DefaultModelLoader._get_weights_iterator", ("self", "source"), weights.wrap_get_weights_iterator),
        Seam(loader, "safetensors_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "buffered_multi_thread_safetensors_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "fastsafetensors_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "instanttensor_weights_iterator", files, loading.wrap_safetensors_iterator, optional=True),
        Seam(loader, "pt_weights_iterator", files, loading.wrap_pickle_iterator),
        Seam(loader, "multi_thread_pt_weights_iterator", files, loading.wrap_pickle_iterator),
        Seam(loader, "np_cache_weights_iterator", (), loading.wrap_pickle_iterator),
    )


def _version() -> str:
    from sglang.version import __version__

    return str(__version__)


SEAMS = Seams("SGLang", "sglang", _version, all_seams)

"""Which test proves which part of the public surface: endpoint, method of the SDK, command of the CLI.

A proof is "file::test", relative to tests/. test_surface.py holds this table against the routes of the gateway, the
public classes of the installed SDK and the commands of its CLI, and writes it into docs/api.md.
"""

from __future__ import annotations

_METHODS = "integration/test_sdk_methods.py::"
_TRAINING = "integration/test_sdk_training.py::"
_SAMPLING = "integration/test_sdk_sampling.py::"
_PROTOCOL = "integration/test_protocol.py::"
_MANAGEMENT = "integration/test_management.py::"
_CLI = "integration/test_cli.py::"
_FUTURES = "integration/test_futures.py::"
_OPENAI = "integration/test_openai.py::"
_IMPORT = "integration/test_import_export.py::"
_CERTIFICATES = "integration/test_certificates.py::"
_DASHBOARD = "unit/gateway/test_dashboard.py::"
_RUN_PAGE = f"{_DASHBOARD}test_a_run_has_its_checkpoints_and_a_download_of_this_host"
_KEYS = "unit/gateway/test_keys.py::"

_TWINS = {
    "ServiceClient": f"{_METHODS}test_every_async_twin_does_the_same",
    "TrainingClient": f"{_METHODS}test_every_async_twin_does_the_same",
    "SamplingClient": f"{_METHODS}test_every_async_twin_does_the_same",
    "RestClient": f"{_MANAGEMENT}test_every_async_twin_does_the_same",
    "AdminClient": f"{_MANAGEMENT}test_every_async_twin_does_the_same",
}
_LOCAL = f"{_METHODS}test_methods_that_need_no_server_work"
_TOKENIZER = "integration/test_many_names.py::test_names_share_a_folder_and_folders_do_not_share_a_trainer"
_LISTINGS = f"{_MANAGEMENT}test_runs_and_checkpoints_are_listed"
_SESSIONS = f"{_MANAGEMENT}test_sessions_are_listed_searched_and_moved"
_PUBLISHED = f"{_MANAGEMENT}test_a_checkpoint_is_published_and_gets_another_ttl"
_DELETED = f"{_MANAGEMENT}test_a_deleted_checkpoint_frees_its_disk_and_its_name"
_DRAINED = "unit/gateway/test_moving.py::test_a_drained_trainer_gives_its_runs_away_and_gets_no_new_ones"
_USAGE = f"{_MANAGEMENT}test_the_audit_log_usage_and_storage_tell_of_a_run"
_EXTERNAL = f"{_MANAGEMENT}test_encrypted_files_open_for_their_recipient_alone"
_COPY = f"{_MANAGEMENT}test_a_copy_outlives_its_source_and_shares_its_bytes"
_RESUMED = f"{_METHODS}test_a_run_resumed_with_its_optimizer_goes_on_as_if_nothing_had_been"
_WAYS = f"{_METHODS}test_every_way_to_a_sampling_client_leads_to_the_same_weights"
_LOADED = f"{_METHODS}test_load_state_replaces_the_weights_and_drops_pending_gradients"
_CUSTOM = "integration/test_stable_reinforce.py::test_a_custom_loss_on_the_server_is_that_of_the_client"

METHODS: dict[str, str] = {
    "ServiceClient.close": f"{_METHODS}test_a_closed_session_is_over",
    "ServiceClient.copy_weights": _COPY,
    "ServiceClient.create_custom_loss": _CUSTOM,
    "ServiceClient.create_lora_training_client": f"{_METHODS}test_equal_seeds_give_equal_models",
    "ServiceClient.create_rest_client": _LOCAL,
    "ServiceClient.create_sampling_client": _WAYS,
    "ServiceClient.create_training_client_from_state": _RESUMED,
    "ServiceClient.create_training_client_from_state_with_optimizer": _RESUMED,
    "ServiceClient.get_console_url": _LOCAL,
    "ServiceClient.get_server_capabilities": f"{_METHODS}test_capabilities_name_the_model_and_its_context",
    "ServiceClient.get_telemetry": _LOCAL,
    "ServiceClient.holder": _LOCAL,
    "TrainingClient.create_sampling_client": _WAYS,
    "TrainingClient.forward": f"{_TRAINING}test_forward_gives_forward_backwards_logprobs_and_no_gradient",
    "TrainingClient.forward_backward": f"{_TRAINING}test_gradients_add_up_until_the_step",
    "TrainingClient.forward_backward_custom": f"{_TRAINING}test_forward_backward_custom_takes_the_users_gradient",
    "TrainingClient.get_console_url": _LOCAL,
    "TrainingClient.get_info": f"{_METHODS}test_get_info_describes_the_model",
    "TrainingClient.get_telemetry": _LOCAL,
    "TrainingClient.get_tokenizer": _TOKENIZER,
    "TrainingClient.load_state": _LOADED,
    "TrainingClient.load_state_with_optimizer": _LOADED,
    "TrainingClient.optim_step": f"{_TRAINING}test_every_setting_of_the_optimizer_is_honoured",
    "TrainingClient.save_state": f"{_METHODS}test_a_checkpoint_is_replaced_only_when_that_is_asked_for",
    "TrainingClient.save_weights_and_get_sampling_client": _WAYS,
    "TrainingClient.save_weights_external": _EXTERNAL,
    "TrainingClient.save_weights_for_sampler": _WAYS,
    "SamplingClient.compute_logprobs": f"{_SAMPLING}test_prompts_are_scored_in_every_way",
    "SamplingClient.create": _LOCAL,
    "SamplingClient.from_sampler_handle": f"{_METHODS}test_a_sampling_client_travels_to_other_processes",
    "SamplingClient.get_base_model": _WAYS,
    "SamplingClient.get_sampler_handle": f"{_METHODS}test_a_sampling_client_travels_to_other_processes",
    "SamplingClient.get_telemetry": _LOCAL,
    "SamplingClient.get_tokenizer": _TOKENIZER,
    "SamplingClient.on_queue_state_change": _LOCAL,
    "SamplingClient.sample": f"{_SAMPLING}test_samples_are_reproducible_and_independent",
    "RestClient.assign_session_project": _SESSIONS,
    "RestClient.copy_weights": _COPY,
    "RestClient.delete_checkpoint": _DELETED,
    "RestClient.delete_checkpoint_from_tinker_path": _DELETED,
    "RestClient.export_session_trace": _SESSIONS,
    "RestClient.get_audit_log": _USAGE,
    "RestClient.get_billing_usage": _USAGE,
    "RestClient.get_current_checkpoint_storage_usage": _USAGE,
    "RestClient.get_external_weights_urls": _EXTERNAL,
    "RestClient.get_sampler": f"{_METHODS}test_get_sampler_says_what_is_sampled",
    "RestClient.get_server_capabilities": f"{_METHODS}test_capabilities_name_the_model_and_its_context",
    "RestClient.get_session": _SESSIONS,
    "RestClient.get_telemetry": _LOCAL,
    "RestClient.get_training_run": _LISTINGS,
    "RestClient.get_training_run_by_tinker_path": _LISTINGS,
    "RestClient.get_weights_info_by_tinker_path": _LISTINGS,
    "RestClient.list_checkpoints": _LISTINGS,
    "RestClient.list_sessions": _SESSIONS,
    "RestClient.list_training_runs": _LISTINGS,
    "RestClient.list_user_checkpoints": _LISTINGS,
    "RestClient.publish_checkpoint_from_tinker_path": _PUBLISHED,
    "RestClient.search_sessions": _SESSIONS,
    "RestClient.set_checkpoint_ttl_from_tinker_path": _PUBLISHED,
    "RestClient.unpublish_checkpoint_from_tinker_path": _PUBLISHED,
    "RestClient.whoami": f"{_KEYS}test_whoami_of_the_sdk_reads_the_keys_holder",
    "AdminClient.get_audit_log": _USAGE,
    "AdminClient.get_billing_usage": _USAGE,
    "AdminClient.get_current_checkpoint_storage_usage": _USAGE,
    "AdminClient.get_telemetry": _LOCAL,
}
"""Class.method of the SDK -> proof. A twin whose name ends in `_async` has the proof of all twins of its class."""

_WHAT_THERE_IS = f"{_CLI}test_what_there_is"
_CHANGES = f"{_CLI}test_changes_to_a_checkpoint"
_LOGIN = f"{_KEYS}test_tinker_auth_login_status_logout"

COMMANDS: dict[str, str] = {
    "tinker auth login": _LOGIN,
    "tinker auth logout": _LOGIN,
    "tinker auth status": _WHAT_THERE_IS,
    "tinker auth whoami": f"{_KEYS}test_tinker_auth_whoami",
    "tinker billing checkpoint-storage": f"{_CLI}test_what_was_used",
    "tinker billing usage": f"{_CLI}test_what_was_used",
    "tinker checkpoint delete": _CHANGES,
    "tinker checkpoint download": f"{_CLI}test_a_downloaded_checkpoint_is_a_folder_of_peft",
    "tinker checkpoint info": _WHAT_THERE_IS,
    "tinker checkpoint list": _WHAT_THERE_IS,
    "tinker checkpoint publish": _CHANGES,
    "tinker checkpoint set-ttl": _CHANGES,
    "tinker checkpoint unpublish": _CHANGES,
    "tinker model list": _WHAT_THERE_IS,
    "tinker run info": _WHAT_THERE_IS,
    "tinker run list": _WHAT_THERE_IS,
    "tinker session export-trace": f"{_CLI}test_the_timeline_of_a_session",
    "tinker version": _WHAT_THERE_IS,
}
"""Command -> proof."""

_BARE = "/api/v1/training_runs/{run_id}/checkpoints/{name}"
_ASKS_FOR_KIND = "answered 400, which asks for the checkpoint's kind"
_ASKED_FOR_KIND = "unit/gateway/test_forms_of_peers.py::test_a_bare_name_of_a_checkpoint_is_asked_for_its_kind"

REMARKS: dict[str, str] = {
    "tinker checkpoint push-hf": "served: its calls are those of `download`; no test, because the upload needs the hub",
    f"DELETE {_BARE}": _ASKS_FOR_KIND,
    f"POST {_BARE}/publish": _ASKS_FOR_KIND,
    f"PUT {_BARE}/ttl": _ASKS_FOR_KIND,
    "DELETE /api/v1/auth/apikey/me": "supported; answered 403 for a key of the configuration",
}
"""Verdicts of everything that is not simply supported. An entry without a proof is a command that no test completes."""

_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
_POLICY = "/api/v1/training_runs/{run_id}/retention"
_RETENTION = "unit/gateway/test_retention.py::"
_STORED = "integration/test_stored_checkpoints.py::"
_ARCHIVE = f"{_MANAGEMENT}test_an_archive_for_old_sdks_holds_the_adapter"
_EARLY = "unit/gateway/test_early_sdks.py::"
_JSON = "unit/gateway/test_json_forms.py::"

ENDPOINTS: dict[str, str] = {
    "POST /api/v1/asample": f"{_SAMPLING}test_samples_are_reproducible_and_independent",
    "GET /api/v1/audit": _USAGE,
    "GET /api/v1/trainers": _DRAINED,
    "POST /api/v1/trainers/drain": _DRAINED,
    "POST /api/v1/trainers/undrain": _DRAINED,
    "DELETE /api/v1/auth/apikey/me": f"{_KEYS}test_a_key_cannot_be_deleted_and_stays_valid",
    "GET /api/v1/auth/apikey/me": f"{_KEYS}test_a_key_is_described_as_the_configuration_names_it",
    "POST /api/v1/auth/token": f"{_KEYS}test_a_token_stands_for_its_key_beside_the_key_itself",
    "GET /api/v1/billing/usage/checkpoints/current": _USAGE,
    "GET /api/v1/billing/usage/events": _USAGE,
    "POST /api/v1/cancel_future": f"{_FUTURES}test_an_abandoned_sample_stops_at_once",
    "GET /api/v1/checkpoints": _LISTINGS,
    "POST /api/v1/checkpoints/import": f"{_IMPORT}test_an_imported_adapter_computes_what_peft_computes_and_trains_on",
    "POST /api/v1/client/config": f"{_PROTOCOL}test_health_and_the_calls_before_a_session",
    "POST /api/v1/client/dynamic_config": f"{_PROTOCOL}test_health_and_the_calls_before_a_session",
    "POST /api/v1/copy_weights": _COPY,
    "POST /api/v1/create_custom_loss": _CUSTOM,
    "POST /api/v1/create_model": f"{_METHODS}test_equal_seeds_give_equal_models",
    "POST /api/v1/create_sampling_session": _WAYS,
    "POST /api/v1/create_session": f"{_PROTOCOL}test_repeats_of_everything_else_are_the_same_thing_too",
    "POST /api/v1/forward": f"{_JSON}test_json_batches_run_and_answers_follow_the_accept_header",
    "POST /api/v1/forward_backward": f"{_PROTOCOL}test_zstd_and_plain_bodies_mean_the_same",
    "POST /api/v1/get_info": f"{_METHODS}test_get_info_describes_the_model",
    "GET /api/v1/get_server_capabilities": f"{_METHODS}test_capabilities_name_the_model_and_its_context",
    "GET /api/v1/healthz": f"{_PROTOCOL}test_health_and_the_calls_before_a_session",
    "POST /api/v1/join_sampling_session": (
        f"{_FUTURES}test_clients_that_join_a_sampling_session_get_numbers_of_their_own"
    ),
    "POST /api/v1/load_weights": _LOADED,
    "POST /api/v1/optim_step": f"{_TRAINING}test_every_setting_of_the_optimizer_is_honoured",
    "POST /api/v1/retrieve_future": f"{_PROTOCOL}test_a_poll_is_held_and_then_says_try_again",
    "POST /api/v1/retrieve_futures": f"{_FUTURES}test_the_sdk_waits_for_many_samples_with_one_poll",
    "GET /api/v1/samplers/{sampling_session_id}": f"{_METHODS}test_get_sampler_says_what_is_sampled",
    "GET /api/v1/samplers/{sampling_session_id}/certificate": f"{_CERTIFICATES}test_a_sampler_without_a_path_has_one",
    "POST /api/v1/save_weights": f"{_METHODS}test_a_checkpoint_is_replaced_only_when_that_is_asked_for",
    "POST /api/v1/save_weights_external": _EXTERNAL,
    "POST /api/v1/save_weights_for_sampler": _WAYS,
    "POST /api/v1/session_heartbeat": f"{_METHODS}test_a_closed_session_is_over",
    "GET /api/v1/sessions": _SESSIONS,
    "POST /api/v1/sessions/search": _SESSIONS,
    "GET /api/v1/sessions/{session_id}": _SESSIONS,
    "POST /api/v1/sessions/{session_id}/finish": f"{_METHODS}test_a_closed_session_is_over",
    "PUT /api/v1/sessions/{session_id}/project": _SESSIONS,
    "GET /api/v1/sessions/{session_id}/trace_export": _SESSIONS,
    "POST /api/v1/telemetry": f"{_METHODS}test_telemetry_is_swallowed",
    "GET /api/v1/training_runs": _LISTINGS,
    "GET /api/v1/training_runs/{run_id}": _LISTINGS,
    "GET /api/v1/training_runs/{run_id}/checkpoints": _LISTINGS,
    "GET /api/v1/models/{run_id}/checkpoints": f"{_EARLY}test_checkpoints_of_a_run_are_listed_under_its_first_name_too",
    f"DELETE {_CHECKPOINT}": _DELETED,
    f"GET {_CHECKPOINT}": f"{_RETENTION}test_everything_about_a_checkpoint_and_whether_it_is_intact",
    f"GET {_CHECKPOINT}/archive": _ARCHIVE,
    f"GET {_CHECKPOINT}/certificate": f"{_CERTIFICATES}test_every_published_version_has_a_certificate",
    f"GET {_CHECKPOINT}/external_weights_urls": _EXTERNAL,
    f"DELETE {_CHECKPOINT}/pin": f"{_RETENTION}test_a_pinned_checkpoint_outlives_its_ttl_until_it_is_unpinned",
    f"POST {_CHECKPOINT}/pin": f"{_RETENTION}test_pinned_published_and_sampled_ones_stay_whatever_the_policy",
    f"DELETE {_CHECKPOINT}/publish": _PUBLISHED,
    f"POST {_CHECKPOINT}/publish": _PUBLISHED,
    f"PUT {_CHECKPOINT}/ttl": _PUBLISHED,
    f"GET {_CHECKPOINT}/verify": f"{_STORED}test_verify_reads_all_of_a_checkpoint_and_names_what_is_damaged",
    f"DELETE {_POLICY}": f"{_RETENTION}test_a_policy_says_what_it_would_delete_and_the_reaper_does_it",
    f"GET {_POLICY}": f"{_RETENTION}test_a_policy_says_what_it_would_delete_and_the_reaper_does_it",
    f"PUT {_POLICY}": f"{_RETENTION}test_a_policy_says_what_it_would_delete_and_the_reaper_does_it",
    f"POST {_POLICY}/prune": f"{_STORED}test_prune_shows_its_plan_and_does_it_when_told_to",
    f"DELETE {_BARE}": _ASKED_FOR_KIND,
    f"POST {_BARE}/publish": _ASKED_FOR_KIND,
    f"PUT {_BARE}/ttl": _ASKED_FOR_KIND,
    "POST /api/v1/unload_model": "unit/gateway/test_ended_runs.py::test_a_run_ends_once_its_work_is_done",
    "POST /api/v1/weights_info": f"{_METHODS}test_weights_info_describes_both_kinds_of_checkpoint",
    "GET /download/archives/{run_id}/{kind}/{name}": _ARCHIVE,
    "GET /download/files/{run_id}/{kind}/{name}/{file}": _EXTERNAL,
    "GET /download/traces/{session_id}": _SESSIONS,
    "GET /metrics": f"{_PROTOCOL}test_metrics_of_all_services_move",
    "GET /": f"{_DASHBOARD}test_the_page_allows_nothing_but_its_own_files",
    "GET /dashboard/api/checkpoints/{run_id}/{kind}/{name}/download": _RUN_PAGE,
    "GET /dashboard/api/overview": f"{_DASHBOARD}test_the_overview_tells_of_runs_and_of_the_server",
    "GET /dashboard/api/runs/{run_id}": _RUN_PAGE,
    "GET /dashboard/api/runs/{run_id}/history": f"{_DASHBOARD}test_a_runs_numbers_are_there_after_a_restart_and_go_on",
    "GET /dashboard/api/runs/{run_id}/samples": f"{_DASHBOARD}test_recent_samples_are_text_token_by_token",
    "GET /dashboard/api/services": f"{_DASHBOARD}test_services_are_told_with_and_without_their_figures",
    "GET /dashboard/api/sessions": f"{_DASHBOARD}test_sessions_count_what_they_have",
    "GET /openapi.json": "unit/gateway/test_openapi.py::test_it_is_served_without_a_key_and_tells_who_needs_one",
    "POST /v1/chat/completions": f"{_OPENAI}test_a_chat_is_rendered_by_the_models_template",
    "POST /v1/responses": f"{_OPENAI}test_a_response_says_what_a_chat_says",
    "POST /v1/completions": f"{_OPENAI}test_a_completion_is_what_the_sdk_samples",
    "GET /v1/models": f"{_OPENAI}test_models",
    "GET /v1/models/{model:path}": f"{_OPENAI}test_models",
}
"""METHOD path -> proof."""


def proof_of(name: str, proofs: dict[str, str]) -> str | None:
    client, _, method = name.partition(".")
    return proofs.get(name) or (_TWINS.get(client) if method.endswith("_async") else None)

"""The tests that show, through real processes, that a field of a request is not ignored.

Fields of the public protocol are named MESSAGE.FIELD, as in the proto files. A field is either in a table of
tests/processes/test_request_fields.py, where one test compares the answers with and without it, or has its own test
here. Each field of an HTTP body is in a table of tests/processes/test_http_fields.py, by endpoint and name.
tests/unit/fields/test_coverage.py checks that all fields are there, and that the named tests exist.
"""

from __future__ import annotations

from collections.abc import Mapping

FIELDS = "tests/processes/test_request_fields.py::"
SUPPORT = "tests/processes/test_support.py::"
SPEECH = "tests/processes/test_speech.py::"
SPECULATION = "tests/processes/test_speculation.py::"
DECISIONS = "tests/processes/test_decisions.py::"
SESSIONS = "tests/processes/test_sessions.py::"
RESUME = "tests/processes/test_resume.py::"

ROUTES = "tests/processes/test_routes.py::test_flips_kills_and_lost_shadows_lose_no_request"
ADAPTERS = "tests/processes/test_adapters.py::test_loading_unloading_and_refusals"
IMAGES = "tests/processes/test_images.py::test_images_equal_transformers_when_a_worker_is_killed"
EMBED = "tests/processes/test_embeddings.py::"
POOLING = EMBED + "test_a_request_can_change_how_texts_are_pooled"
ANSWERS = EMBED + "test_answers_of_a_causal_reranker_are_scores"
REFUSALS = EMBED + "test_a_decoder_without_configuration_scores_nothing"
HTTP_BODIES = EMBED + "test_every_field_of_an_http_body_has_an_effect"

# Endpoints whose fields one test of their own covers: the model of the other fields computes no scores.
OWN_ENDPOINTS: Mapping[str, str] = {
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling", "/v1/score", "/v1/rerank"), HTTP_BODIES),
    "/inference/v1/generate": "tests/processes/test_rollouts.py::test_token_ids_in_and_out_over_http",
    "/v1/decisions": DECISIONS + "test_openai_client_gets_decisions",
    "/classify": EMBED + "test_classes_equal_those_of_transformers",
}

OWN_TESTS: Mapping[str, str] = {
    "EmbedRequest.request_id": POOLING,
    "EmbedRequest.model": POOLING,
    "EmbedRequest.inputs": EMBED + "test_embeddings_equal_those_of_sentence_transformers",
    "EmbedRequest.pooling": POOLING,
    "EmbedRequest.normalize": POOLING,
    "EmbedRequest.dimensions": POOLING,
    "EmbedRequest.prompt_name": POOLING,
    "EmbedRequest.truncate": POOLING,
    "EmbedRequest.scheduling": REFUSALS,
    "ScoreRequest.request_id": ANSWERS,
    "ScoreRequest.model": ANSWERS,
    "ScoreRequest.pairs": EMBED + "test_scores_equal_those_of_cross_encoders",
    "ScoreRequest.instruction": ANSWERS,
    "ScoreRequest.truncate": EMBED + "test_scores_equal_those_of_cross_encoders",
    "ScoreRequest.scheduling": REFUSALS,
    "TextPair.query": EMBED + "test_scores_equal_those_of_cross_encoders",
    "TextPair.document": EMBED + "test_scores_equal_those_of_cross_encoders",
    **{
        f"DecideRequest.{name}": DECISIONS + "test_wrong_questions_are_refused_by_name"
        for name in ("request", "questions")
    },
    **{
        f"{name}": DECISIONS + "test_the_order_of_questions_and_a_killed_worker_change_nothing"
        for name in (
            "Question.instructions",
            "Question.choices",
            "Question.levels",
            "Choice.label",
            "Choice.description",
        )
    },
    "ContentPart.image": IMAGES,
    "GenerateRequest.media": IMAGES,
    "GenerateRequest.request_id": FIELDS + "test_a_request_id_and_a_seed_are_in_the_answer",
    "GenerateRequest.joins_events": FIELDS + "test_joined_events_are_fewer_messages",
    "GenerateRequest.receipt": "tests/processes/test_receipts.py::test_honest_receipts_are_confirmed",
    "GenerateRequest.resumable": FIELDS + "test_a_resumable_request_has_a_record",
    **{
        f"GenerateRequest.draft_{name}": "tests/processes/test_old_answers.py::test_each_kind_of_draft_changes_no_token"
        for name in ("of", "token_ids", "text")
    },
    "SamplingParams.speculative": SPECULATION + "test_answers_are_those_without_drafts_also_after_a_kill",
    "SchedulingParams.priority": FIELDS + "test_priority_and_tenant_order_the_queue",
    "SchedulingParams.conversation": SESSIONS + "test_blocks_of_conversations_outlive_those_of_single_prompts",
    "SchedulingParams.tenant_id": FIELDS + "test_priority_and_tenant_order_the_queue",
    "SchedulingParams.cache_salt": FIELDS + "test_requests_with_different_salts_share_no_blocks",
    "Prompt.audio": SPEECH + "test_outputs_equal_transformers_also_after_a_kill",
    "Audio.data": SPEECH + "test_outputs_equal_transformers_also_after_a_kill",
    "Audio.format": SPEECH + "test_outputs_equal_transformers_also_after_a_kill",
    "Audio.language": SPEECH + "test_outputs_equal_transformers_also_after_a_kill",
    "Audio.task": SPEECH + "test_outputs_equal_transformers_also_after_a_kill",
    "Audio.prompt": SPEECH + "test_text_before_the_speech_equals_transformers",
    "GenerateRequest.session_id": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "GenerateRequest.session_sample": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "CheckpointRequest.session_id": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "ForkRequest.session_id": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "ForkRequest.n": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "RewindRequest.session_id": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "RewindRequest.num_tokens": SESSIONS + "test_turns_forks_and_rewinds_equal_undisturbed_runs",
    "PinRequest.session_id": SESSIONS + "test_the_command_lists_shows_and_deletes_sessions",
    "PinRequest.ttl_s": SESSIONS + "test_the_command_lists_shows_and_deletes_sessions",
    "GetSessionRequest.session_id": SESSIONS + "test_the_command_lists_shows_and_deletes_sessions",
    "GetSessionRequest.with_content": "tests/processes/test_explain.py::test_a_stored_answer_is_explained",
    "DeleteSessionRequest.session_id": SESSIONS + "test_the_command_lists_shows_and_deletes_sessions",
    "ResumeRequest.request_id": RESUME + "test_a_client_with_only_the_id_continues_after_its_gateway_was_killed",
    "ResumeRequest.after": RESUME + "test_resume_takes_over_a_request_that_still_runs",
    "ResumePosition.index": RESUME + "test_resume_takes_over_a_request_that_still_runs",
    "ResumePosition.num_tokens": RESUME + "test_resume_takes_over_a_request_that_still_runs",
    "AbortRequest.request_ids": "tests/processes/test_cancel.py::test_abort_ends_streams_with_their_tokens_so_far",
    "InspectRequest.kind": SUPPORT + "test_a_bundle_has_everything_but_secrets",
    "InspectRequest.service": SUPPORT + "test_services_are_named_by_address_and_id",
    "InspectRequest.seconds": SUPPORT + "test_a_profile_of_each_service",
    "InspectRequest.hz": SUPPORT + "test_services_are_named_by_address_and_id",
    "DrainWorkerRequest.worker_id": FIELDS + "test_a_worker_is_drained_by_id_and_model_within_its_time",
    "DrainWorkerRequest.model": FIELDS + "test_a_worker_is_drained_by_id_and_model_within_its_time",
    "LoadAdapterRequest.name": ADAPTERS,
    "LoadAdapterRequest.path": ADAPTERS,
    "LoadAdapterRequest.model": ADAPTERS,
    "UnloadAdapterRequest.name": ADAPTERS,
    "UnloadAdapterRequest.model": ADAPTERS,
    "ListAdaptersRequest.model": ADAPTERS,
    "SetRouteRequest.route": ROUTES,
    "Route.name": ROUTES,
    "Route.targets": ROUTES,
    "Route.shadow": ROUTES,
    "DrainWorkerRequest.timeout_s": FIELDS + "test_a_worker_is_drained_by_id_and_model_within_its_time",
}

"""Field reports about stop conditions, as small cases with the behaviour of vLLM 0.22.0.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

import pytest
from engines import Engine, drafting, engine_config, serve, spec

from servetwin.sim.config import EngineConfig, ModelConfig

EOS, STOP, OTHER = 2, 5, 9


def test_42_what_comes_after_a_stop_in_the_same_step_is_dropped() -> None:
    """Eight outputs of ten so far, and a step with two right drafts brings [EOS, t, t]: a stop with nine outputs."""
    engine = Engine(engine_config(eos_token_id=EOS, speculative=drafting("ngram", 2)))
    r = engine.add("r", 4, 10, answer=[OTHER] * 8 + [EOS, 7, 7])
    engine.run(until=lambda: r.num_output_tokens == 8)
    engine.draft("r", right=2)
    frame = engine.schedule()
    output = engine.model_output(frame.plan)
    assert output.sampled_token_ids == [[EOS, 7, 7]]
    (told,) = engine.core.complete(frame, output).outputs
    assert (told.new_token_ids, told.finish_reason) == ([EOS], "stop")
    assert (r.num_output_tokens, r.output_token_ids[-1]) == (9, EOS)


def test_43_a_prompt_just_below_the_window_gets_one_token() -> None:
    """15 of 16 tokens."""
    log = serve([spec("r", 15, 5)], engine_config(max_model_len=16))
    (row,) = log.requests.to_dict("records")
    assert (row["num_output_tokens"], row["finish_reason"]) == (1, "length")


@pytest.mark.parametrize("prompt", [16, 17])
def test_43_a_prompt_that_fills_the_window_is_refused(prompt: int) -> None:
    """With the reason; it is never queued, and no step is made for it."""
    log = serve([spec("r", prompt, 5)], engine_config(max_model_len=16))
    assert log.events.kind.tolist() == ["arrived", "refused"]
    assert (
        log.events.reason.iloc[1]
        == f"prompt of {prompt} tokens leaves no room for output: max_model_len is 16"
    )
    assert log.requests.queued_s.isna().all()
    assert log.steps.empty


def test_46_stop_tokens_count_although_eos_is_ignored() -> None:
    """EOS at output 3 is passed over; the stop token at output 6 ends it and is the reason."""
    engine = Engine(engine_config(eos_token_id=EOS))
    answer = [OTHER, OTHER, EOS, OTHER, OTHER, STOP, OTHER]
    r = engine.add("r", 4, 10, ignore_eos=True, stop_token_ids=[STOP], answer=answer)
    engine.run()
    assert r.output_token_ids == [OTHER, OTHER, EOS, OTHER, OTHER, STOP]
    assert (r.finish_reason, r.stop_reason) == ("stop", STOP)


@pytest.mark.parametrize(("ignore_eos", "outputs", "reason"), [(True, 10, "length"), (False, 6, "stop")])
def test_46_length_controlled_load_gets_exactly_its_length(
    ignore_eos: bool, outputs: int, reason: str
) -> None:
    """A model's end-of-turn tokens are stop tokens only of a run that heeds EOS."""
    model = ModelConfig(max_model_len=64, vocab_size=100, eos_token_id=EOS, extra_eos_token_ids=(STOP,))
    config = EngineConfig(model=model)
    answer = (OTHER,) * 5 + (STOP, EOS) + (OTHER,) * 3
    log = serve([spec("r", 4, 10, output_token_ids=answer)], config, ignore_eos=ignore_eos)
    (row,) = log.requests.to_dict("records")
    assert (row["num_output_tokens"], row["finish_reason"]) == (outputs, reason)

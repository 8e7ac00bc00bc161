"""The balancing policies on real engines, against the fp64 reference."""

import tempfile
from dataclasses import replace

import pytest
import torch

import reference
from engine_grid import BASE, SEQUENCES, Batch, make_model, used_token, windows_of
from models import MODEL_DIM
from ranks import run_ranks
from window_runs import Script, batches, of_run, wrong

pytestmark = pytest.mark.ranks

CARRY = replace(BASE, estimate="carry", gradient_accumulation_steps=3)


def _check_windows(runs):
    return [_train_windows(*run) for run in runs]


def _train_windows(cell, lengths, resumes_after, folder):
    script = Script(cell)
    records = []
    for window, length in enumerate(lengths):
        if window == resumes_after:
            script.engine.save_checkpoint(folder)
            script.finish()
            script = Script(cell)
            script.window(batches(cell, window=9, num=length))
            assert script.engine.load_checkpoint(folder)[0] is not None
        boundary = "early" if set(lengths) != {cell.gradient_accumulation_steps} else "engine"
        window_batches = batches(cell, window=window, num=length)
        records.append(script.window(window_batches, boundary=boundary))
    script.finish()
    return records


def test_carry_in_full_short_and_long_windows_and_after_a_resume():
    both = [CARRY, replace(CARRY, mechanism="injection")]
    with tempfile.TemporaryDirectory() as folder:
        runs = [(replace(cell, tokens="masked", zero_stage=2), (3, 3), None, "") for cell in both]
        runs += [(replace(cell, top_k=4), (2, 3, 4, 3), None, "") for cell in both]
        runs += [(cell, (3, 3, 3), 2, f"{folder}/{cell.mechanism}") for cell in both]
        runs += [(replace(CARRY, checkpointing="reentrant", top_k=1), (3, 3), None, "")]
        results = run_ranks(_check_windows, 2, runs, timeout_s=180)
    for index, run in enumerate(runs):
        assert wrong(run[0], of_run(results, index)) == [], str(run)


# ------------------------------------------------------------------------------------------------
# exact

NUM_PLACES = 4


def _check_exact(cells, wholes):
    return [_train_exact(cell) for cell in cells] + [_train_whole(cell) for cell in wholes]


def _train_exact(cell, **model_arguments):
    """Two windows through `window(...)`; the same global batch however it is cut."""
    script = _exact_script(cell, **model_arguments)
    records = []
    for window in range(2):
        window_batches = batches(cell, window=window, num=cell.gradient_accumulation_steps)
        records.append(script.window(_counted(script, window_batches)))
    script.finish()
    return records


def _exact_script(cell, **model_arguments):
    # What is dropped depends on the cut, and with it the second layer's input.
    return Script(cell, model=make_model(cell, drop_tokens=False, **model_arguments))


def _counted(script, window_batches):
    """The batches as `window(...)` yields them, after its counting pass."""

    def forward(batch):
        mask = used_token(batch)
        script.engine(batch.x, mask)

    with script.recorder.paused():
        yielded = list(script.engine.load_balancer.window(iter(window_batches), forward))
    assert [batch is other for batch, other in zip(yielded, window_batches, strict=True)]
    return yielded


def _train_whole(cell):
    """One process and one micro-step with the batches of all places."""
    script = _exact_script(cell)
    records = []
    for window in range(2):
        places = replace(cell, gradient_accumulation_steps=NUM_PLACES)
        parts = batches(places, window=window, num=NUM_PLACES)
        masks = [part.valid_mask for part in parts]
        whole = Batch(
            torch.cat([part.x for part in parts]),
            torch.cat([part.y for part in parts]),
            None if masks[0] is None else torch.cat(masks),
        )
        records.append(script.window(_counted(script, [whole])))
    script.finish()
    return records


def test_exact_does_not_depend_on_the_cut_and_is_one_process_on_the_whole_batch():
    kinds = [
        {"mechanism": "l_aux", "tokens": "masked", "checkpointing": "reentrant"},
        {"mechanism": "injection", "top_k": 4, "checkpointing": "non_reentrant", "zero_stage": 2},
    ]
    results = {}
    for world_size in (1, 2, 4):
        cells = [
            replace(
                BASE,
                estimate="exact",
                world_size=world_size,
                gradient_accumulation_steps=NUM_PLACES // world_size,
                **kind,
            )
            for kind in kinds
        ]
        # One micro-step with all: a window of one process.
        wholes = [replace(cell, gradient_accumulation_steps=1) for cell in cells]
        wholes = wholes if world_size == 1 else []
        ran = run_ranks(_check_exact, world_size, cells, wholes, timeout_s=120)
        for index, cell in enumerate([*cells, *wholes]):
            per_rank = of_run(ran, index)
            assert wrong(cell, per_rank) == [], str(cell)
            kind, cut = index % len(kinds), (world_size, cell.gradient_accumulation_steps)
            results[kind, cut] = [record.grads for record in per_rank[0]]
    for (kind, cut), grads in results.items():
        torch.testing.assert_close(grads, results[kind, (1, 1)], rtol=1e-5, atol=1e-7, msg=str(cut))


def _check_misuse():
    """What becomes of a loop that is left, of wrong numbers, and of no loop at all."""
    cell = replace(BASE, estimate="exact", mechanism="injection")
    script = _exact_script(cell)
    balancer = script.engine.load_balancer
    said = {}

    def attempt(name, function):
        with pytest.raises((RuntimeError, ValueError)) as caught, script.recorder.paused():
            function()
        said[name] = f"{caught.type.__name__}: {caught.value}"

    two, three = (batches(cell, window=0, num=number) for number in (2, 3))
    script.l_aux = []
    attempt("no loop", lambda: script.forward(two[0]))
    attempt("too many", lambda: balancer.window(three, script.forward))
    attempt("too few", lambda: balancer.window(iter(two[:1]), script.forward))
    attempt("no forward", lambda: balancer.window(two, lambda batch: None))
    attempt(
        "two forwards",
        lambda: balancer.window(two, lambda b: (script.forward(b), script.forward(b))),
    )
    script.engine.eval()
    attempt("evaluation", lambda: balancer.window(two, script.forward))
    script.engine.train()
    # A longer iterator keeps what it has beyond G.
    longer = iter(three)
    with script.recorder.paused():
        yielded = list(balancer.window(longer, script.forward))
    assert all(a is b for a, b in zip(yielded, three, strict=False)) and len(yielded) == 2
    assert list(longer) == three[2:]
    records = [script.window(two)]
    # The loop is left after one micro-step: f stays for the rest of the window.
    second = batches(cell, window=1, num=2)
    with script.recorder.paused():
        for _ in balancer.window(second, script.forward):
            break

    def between(micro_step):
        if micro_step == 1:
            attempt("inside", lambda: balancer.window(second, script.forward))
            with torch.no_grad(), script.recorder.paused():  # an evaluation does not count
                script.engine.eval()
                script.engine(second[0].x)
                script.engine.train()

    records.append(script.window(second, between=between))
    attempt("no loop again", lambda: script.forward(two[0]))
    script.finish()
    return records, said


def test_exact_says_what_is_wrong_and_takes_a_loop_that_was_left():
    results = run_ranks(_check_misuse, 2, timeout_s=60)
    cell = replace(BASE, estimate="exact", mechanism="injection")
    assert wrong(cell, of_run(results, 0)) == []
    for _, said in results:
        assert said["no loop"].startswith("RuntimeError: moe_load_balancing.estimate: 'exact'")
        assert "engine.load_balancer.window(batches, forward)" in said["no loop"]
        assert said["no loop again"] == said["no loop"]
        assert "got 3 batches, expected gradient_accumulation_steps = 2" in said["too many"]
        assert "got 1 batches, expected gradient_accumulation_steps = 2" in said["too few"]
        assert "ran the engine 0 times for batch 1" in said["no forward"]
        assert "ran the engine 2 times for batch 1" in said["two forwards"]
        assert "evaluation mode" in said["evaluation"]
        assert "called 1 micro-steps into an accumulation window" in said["inside"]


def _check_noise(kinds):
    """Per gate noise: is the random state restored, and what differs with it and with another."""
    seen = []
    for top_k, noise in kinds:
        cell = replace(BASE, estimate="exact", top_k=top_k)
        script = Script(cell, model=make_model(cell, drop_tokens=False, **noise))
        balancer, script.l_aux = script.engine.load_balancer, []
        window_batches = batches(cell, window=0, num=2)
        differences = []
        for seed in (None, 6):
            before = torch.get_rng_state()
            for number, batch in enumerate(balancer.window(window_batches, script.forward)):
                if number == 0:
                    is_restored = torch.equal(before, torch.get_rng_state())
                    if seed is not None:
                        torch.manual_seed(seed)
                script.engine.backward(script.forward(batch))
                differences.append(balancer.balance.recount_difference())
                script.engine.step()
        seen.append((is_restored, differences[1], differences[3]))
        script.finish()
    return seen


def test_the_counting_pass_sees_the_noise_of_training():
    kinds = [(1, {"noisy_gate_policy": "RSample"}), (2, {"top2_2nd_expert_sampling": True})]
    for of_rank in run_ranks(_check_noise, 2, kinds, timeout_s=60):
        for is_restored, same_noise, other_noise in of_rank:
            assert is_restored and same_noise == 0.0 and other_noise > 0.0


# ------------------------------------------------------------------------------------------------
# hybrid, z-loss, sequence

MASKED = replace(BASE, tokens="masked", zero_stage=2)
INJECTED = replace(MASKED, mechanism="injection")
HYBRID = {"micro_batch_weight": 0.3}
Z_LOSS = {"z_loss_coeff": 0.2}
SEQUENCE = {"scope": "sequence"}


def _terms(section):
    """The reference's arguments for a section."""
    names = {
        "scope": "estimate",
        "z_loss_coeff": "z_coeff",
        "micro_batch_weight": "micro_batch_weight",
        "aux_loss_coeff": "coeff",
    }
    terms = {names[key]: value for key, value in section.items()}
    return terms | {"num_sequences": SEQUENCES}


def _check_terms(runs):
    return [_train_terms(*run) for run in runs]


def _train_terms(cell, section):
    script = Script(cell, section=section)
    records, values, used = [], [], []
    for window in range(2):
        records.append(script.window(batches(cell, window=window, num=2)))
        values.append(script.l_aux)
        report = script.engine.load_balancer.metrics()
        used.append([report.get(f"lbl_used/layer_{layer:02d}") for layer in range(2)])
    number = script.engine.load_balancer.balance.reducer.num_collectives
    script.finish()
    return records, values, used, number


TERMS = [
    (MASKED, HYBRID),
    (replace(MASKED, estimate="boundary", checkpointing="reentrant"), HYBRID),
    (INJECTED, HYBRID),
    (replace(INJECTED, estimate="carry", checkpointing="non_reentrant"), HYBRID | Z_LOSS),
    (replace(INJECTED, checkpointing="reentrant", top_k=4), Z_LOSS),
    (replace(INJECTED, estimate="boundary", top_k=1), Z_LOSS | {"aux_loss_coeff": 0.0}),
    (MASKED, SEQUENCE),
    (replace(MASKED, checkpointing="reentrant", top_k=4), SEQUENCE),
    (replace(INJECTED, checkpointing="non_reentrant"), SEQUENCE | Z_LOSS),
    (replace(INJECTED, tokens="even"), {"scope": "micro_batch"} | Z_LOSS),
]


def test_hybrid_z_loss_and_sequence_equal_the_reference():
    results = run_ranks(_check_terms, 2, TERMS, timeout_s=180)
    for index, (cell, section) in enumerate(TERMS):
        ran, terms = of_run(results, index), _terms(section)
        per_rank = [records for records, *_ in ran]
        assert wrong(cell, per_rank, **terms) == [], (str(cell), section)
        _check_values(cell, per_rank, ran, terms)
        if "scope" in section:
            assert [number for *_, number in ran] == [0, 0]


def _check_values(cell, per_rank, ran, terms):
    """l_aux of every micro-step, and the reported mean of what was used."""
    for layer in range(2):
        previous = None
        for number, window in enumerate(windows_of(per_rank, layer, cell.top_k)):
            arguments = {"estimate": cell.estimate, "previous": previous} | terms
            expected = reference.balance(window, **arguments)
            previous = window
            for rank, (_, values, used, _) in enumerate(ran):
                if cell.mechanism == "l_aux":
                    got = [of_step[layer] for of_step in values[number]]
                    shares = [of_step[rank] for of_step in expected.shares]
                    assert got == pytest.approx(shares, rel=1e-5, abs=1e-6)
                if terms.get("coeff") == 0.0:
                    assert used[number][layer] is None
                else:
                    mean = sum(expected.losses) / len(expected.losses)
                    assert used[number][layer] == pytest.approx(mean, rel=1e-5)


def _check_clean_logits():
    """The gate's gradient of the z-loss alone, without and with noise on the second choice."""
    grads = []
    for samples in (False, True):
        cell = replace(BASE, mechanism="injection", world_size=1)
        model = make_model(cell, top2_2nd_expert_sampling=samples)
        script = Script(cell, model=model, section=Z_LOSS | {"aux_loss_coeff": 0.0})
        grads.append(script.window(batches(cell, window=0, num=2)).grads[:1])
        script.finish()
    return grads


def test_z_loss_is_that_of_the_clean_logits():
    """k = 2 samples its second expert by adding noise to the very logits."""
    plain, sampled = run_ranks(_check_clean_logits, 1, timeout_s=60)[0]
    assert plain[0].abs().max() > 1e-2
    torch.testing.assert_close(sampled, plain, rtol=1e-6, atol=1e-8)


def _check_flat_input():
    """An MoE layer that is handed (T, M) has no sequences."""
    script = Script(BASE, section=SEQUENCE)
    with pytest.raises(ValueError) as caught:
        script.engine(torch.randn(6, MODEL_DIM))
    script.finish()
    return str(caught.value)


def test_sequences_that_cannot_be_told_are_an_error():
    message = run_ranks(_check_flat_input, 1, timeout_s=60)[0]
    assert "scope: 'sequence' needs the (B, S, M) input of layer 'blocks.0.moe'" in message

"""The balancing policies on real engines, against the fp64 reference."""

import tempfile
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import reference
from engine_grid import BASE, SEQUENCES, Batch, make_engine, make_model, used_token, windows_of
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


def _exact_script(cell, *, section=None, **model_arguments):
    # What is dropped depends on the cut, and with it the second layer's input.
    extra = {key: model_arguments.pop(key) for key in ("torch_autocast",) if key in model_arguments}
    model = make_model(cell, drop_tokens=False, **model_arguments)
    return Script(cell, model=model, section=section, **extra)


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


def _check_autocast(section):
    """Gradient of the first gate under torch_autocast in bf16, with what its router saw."""
    cell = replace(INJECTED, tokens="even")
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    script = _exact_script(cell, section=section, **autocast)
    records = [script.window(batches(cell, window=0, num=2))]
    script.finish()
    return records


def test_z_loss_under_autocast():
    """Logits of bf16 are off by up to 2^-8 of each; the z-loss of sums of exp by not much more."""
    section = Z_LOSS | {"aux_loss_coeff": 0.0}
    records = run_ranks(_check_autocast, 2, section, timeout_s=60)
    cell = replace(INJECTED, tokens="even")
    assert wrong(cell, records, tolerance=2 * 2**-6, **_terms(section)) == []


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


# ------------------------------------------------------------------------------------------------
# schedule

SCHEDULE = [
    {"step": 1, "scope": "micro_batch"},
    {"step": 2, "scope": "global_batch", "estimate": "boundary", "aux_loss_coeff": 0.25},
    {"step": 4, "scope": "none", "aux_loss_coeff": 0.0},
]


def _check_schedule(folder):
    """Five windows, the last two on a resumed engine; the collectives of each."""
    section, records, collectives = {"schedule": SCHEDULE}, [], []
    script = Script(INJECTED, section=section)
    for window in range(5):
        if window == 3:
            script.engine.save_checkpoint(folder)
            script.finish()
            script = Script(INJECTED, section=section)
            script.window(batches(INJECTED, window=9, num=2))
            assert script.engine.load_checkpoint(folder)[0] is not None
        reducer = script.engine.load_balancer.balance.reducer
        before = reducer.num_collectives
        records.append(script.window(batches(INJECTED, window=window, num=2)))
        collectives.append(reducer.num_collectives - before)
    script.finish()
    return records, collectives


def test_a_schedule_changes_terms_at_its_steps_and_survives_a_resume():
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_check_schedule, 2, folder, timeout_s=120)
    per_rank = [records for records, _ in results]
    assert wrong(INJECTED, [records[:1] for records in per_rank]) == []
    assert wrong(INJECTED, [records[1:2] for records in per_rank], estimate="micro_batch") == []
    # The micro-batch window reduced nothing, so there is none before it to take f from.
    boundary = replace(INJECTED, estimate="boundary")
    assert wrong(boundary, [records[2:4] for records in per_rank], coeff=0.25) == []
    for records, collectives in results:
        assert all(not grad.any() for grad in records[4].grads)
        # Each micro-step; none; each micro-step, without a window before, and the window; the
        # window; none.
        assert collectives == [2, 0, 3, 1, 0]


# ------------------------------------------------------------------------------------------------
# bias

RATE = 0.05
BIASED = [
    replace(BASE, mechanism="injection", tokens="masked", top_k=1),
    replace(BASE, top_k=2, zero_stage=2, checkpointing="reentrant"),
    replace(BASE, mechanism="injection", estimate="boundary", top_k=4),
]


def _check_bias(cells, folder):
    return [_train_bias(cell, f"{folder}/{index}") for index, cell in enumerate(cells)]


def _train_bias(cell, folder):
    """Four windows, one of them skipped, one on a resumed engine: biases after each."""
    section = {"bias_update_rate": RATE}
    if cell.top_k == 1:
        section["aux_loss_coeff"] = 0.0
    script = _exact_script(cell, section=section)
    records, biases = [], []
    for window in range(4):
        if window == 3:
            script.engine.save_checkpoint(folder)
            number = script.engine.load_balancer.balance.reducer.num_collectives
            script.finish()
            assert "lb_bias" not in script.model.gates()[0].state_dict()
            script = _exact_script(cell, section=section)
            assert script.engine.load_checkpoint(folder)[0] is not None
            assert [gate.lb_bias.tolist() for gate in script.model.gates()] == biases[-1]

        def skip(micro_step, engine=script.engine, window=window):
            if (window, micro_step) == (1, 1):
                engine.skipped_steps += 1  # as an optimizer does whose gradients overflow

        records.append(script.window(batches(cell, window=window, num=2), between=skip))
        biases.append([gate.lb_bias.tolist() for gate in script.model.gates()])
    script.finish()
    return records, biases, number


def _biased_counts(window, bias, top_k):
    """Per rank the counts of the window when each token takes its largest p + b."""
    num_experts, per_rank = window.num_experts, []
    for rank in range(window.num_ranks):
        chosen = [0] * num_experts
        for inputs, valid in zip(window.inputs, window.valid, strict=True):
            for x, counts in zip(inputs[rank], valid[rank], strict=True):
                logits = [sum(w * v for w, v in zip(row, x, strict=True)) for row in window.weight]
                p = reference.softmax(logits)
                order = sorted(range(num_experts), key=lambda e: -(p[e] + bias[e]))
                for expert in order[:top_k] if counts else []:
                    chosen[expert] += 1
        per_rank.append(chosen)
    return per_rank


def test_the_bias_follows_the_counts_and_steers_the_selection():
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_check_bias, 2, BIASED, folder, timeout_s=120)
    for index, cell in enumerate(BIASED):
        ran = of_run(results, index)
        assert ran[0][1] == ran[1][1]  # the same on all ranks
        differs = 0
        for layer in range(2):
            windows = windows_of([records for records, *_ in ran], layer, cell.top_k)
            bias = [0.0] * windows[0].num_experts
            for number, window in enumerate(windows):
                counts = _biased_counts(window, bias, cell.top_k)
                differs += counts != _biased_counts(window, [0.0] * len(bias), cell.top_k)
                for (records, *_), own in zip(ran, counts, strict=True):
                    assert records[number].counts[layer] == own, (str(cell), layer, number)
                total = reference.add(*counts)
                mean = Fraction(sum(total), len(total))
                if number != 1:  # skipped
                    signs = [(mean > n) - (mean < n) for n in total]
                    bias = [b + RATE * sign for b, sign in zip(bias, signs, strict=True)]
                assert ran[0][1][number][layer] == pytest.approx(bias, abs=1e-6)
        assert differs > 2, "the bias changed no selection"
    # With no loss one reduction for each window, else none besides those of the loss: boundary
    # has one for each window, and one for each micro-step of the first.
    assert [number for *_, number in of_run(results, 0)] == [3, 3]
    assert [number for *_, number in of_run(results, 1)] == [3 * 2 * 2] * 2
    assert [number for *_, number in of_run(results, 2)] == [3 + 2] * 2


def _check_biased_gates(kinds):
    """Each gate without a bias, with one of zeros and with one, on the same tokens and noise."""
    seen = []
    for top_k, noise in kinds:
        cell = replace(BASE, world_size=1, top_k=top_k)
        outputs = []
        biased = {"bias_update_rate": RATE}
        for section, value in (({}, 0), (biased, 0), (biased, 1)):
            script = _exact_script(cell, section=section, **noise)
            gate = script.model.gates()[0]
            bias = value * torch.linspace(0.5, -0.5, gate.wg.weight.shape[0])
            if section:
                gate.lb_bias.copy_(bias)
            x = torch.randn(40, MODEL_DIM, generator=torch.Generator().manual_seed(3))
            torch.manual_seed(4)
            outputs.append([torch.as_tensor(part).detach() for part in gate(x, None, True, False)])
            script.finish()
        probs = torch.softmax(x @ gate.wg.weight.detach().T, dim=1)
        seen.append((outputs, probs, bias))
    return seen


def test_a_bias_of_zeros_is_bitwise_none_and_another_changes_the_selection_alone():
    kinds = [
        (1, {}),
        (1, {"noisy_gate_policy": "RSample"}),
        (2, {"top2_2nd_expert_sampling": True}),
        (2, {}),
        (4, {}),
    ]
    for (top_k, noise), ran in zip(kinds, run_ranks(_check_biased_gates, 1, kinds)[0], strict=True):
        (plain, zero, biased), probs, bias = ran
        for part, other in zip(plain, zero, strict=True):
            assert torch.equal(part, other), (top_k, noise)
        chosen_KT, gates_KT = biased[3].long(), biased[5]
        assert not torch.equal(chosen_KT, plain[3])
        if not noise:
            expected = (probs + bias).topk(top_k, dim=1)[1]
            assert torch.equal(chosen_KT.T.sort(dim=1)[0], expected.sort(dim=1)[0])
        taken = probs.gather(1, chosen_KT.T)
        weights = taken if top_k == 1 else taken / taken.sum(dim=1, keepdim=True)
        torch.testing.assert_close(gates_KT.T, weights, rtol=1e-5, atol=1e-7)
        assert torch.bincount(chosen_KT.flatten(), minlength=len(bias)).equal(biased[6])


def _check_bias_checkpoints(folder):
    """A checkpoint without a bias into an engine with one, and the other way round."""
    section = {"bias_update_rate": RATE}
    script = _exact_script(BASE)
    script.window(batches(BASE, window=0, num=2))
    script.engine.save_checkpoint(folder, tag="without")
    script.finish()
    script = _exact_script(BASE, section=section)
    script.window(batches(BASE, window=0, num=2))
    gate = script.model.gates()[0]
    assert gate.lb_bias.any()
    script.engine.save_checkpoint(folder, tag="with")
    script.engine.load_checkpoint(folder, tag="without")
    is_zero = not gate.lb_bias.any()
    script.finish()
    script = _exact_script(BASE)
    script.engine.load_checkpoint(folder, tag="with")
    has_bias = hasattr(script.model.gates()[0], "lb_bias")
    script.finish()
    plain = make_engine(BASE, make_model(BASE), None)
    with pytest.raises(RuntimeError, match="lb_bias"):
        plain.load_checkpoint(folder, tag="with")
    path, _ = plain.load_checkpoint(folder, tag="with", load_module_strict=False)
    return is_zero, has_bias, path is not None


def test_checkpoints_with_and_without_a_bias():
    with tempfile.TemporaryDirectory() as folder:
        assert (
            run_ranks(_check_bias_checkpoints, 2, folder, timeout_s=60) == [(True, False, True)] * 2
        )

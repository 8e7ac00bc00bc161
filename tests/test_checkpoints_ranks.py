"""Checkpoints that meet another layout, another model, a partial load, or DeepSpeed's converter.

What DeepSpeed itself refuses is refused with the plugin in the same words: every such case is run
with the plugin and without. Resuming at the same layout is in test_installation_ranks.py.
"""

import argparse
import io
import os
import re
import time

import deepspeed
import deepspeed.comm as dist
import pytest
import torch

import ds_moe_lb
from models import MODEL_DIM, TinyMoE, moe_param_groups
from ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

SECTION = {"estimate": "boundary"}
GAS = 2


def _arguments(section, *, ep_size=1, zero_stage=1, num_experts=(8, 12), **extra):
    torch.manual_seed(7)
    model = TinyMoE(k=2, ep_size=ep_size, num_experts=num_experts)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **extra,
    }
    if section is not None:
        config["moe_load_balancing"] = section
    return {"model": model, "model_parameters": moe_param_groups(model), "config": config}


def _engine(section, **layout):
    return ds_moe_lb.initialize(**_arguments(section, **layout))[0]


def _windows(engine, number, *, first=0):
    """Train; returns the losses. Ranks of every layout together see other batches each."""
    losses = []
    for step in range(first * GAS, (first + number) * GAS):
        seed = 100 * step + dist.get_rank()
        batch = torch.randn(2, 4, MODEL_DIM, generator=torch.Generator().manual_seed(seed))
        prediction, l_aux = engine(batch)
        loss = prediction.square().mean() + 0.1 * sum(l_aux)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _previous_counts(engine):
    previous = engine.load_balancer.balance.previous
    return None if previous is None else previous.wait().counts_F.tolist()


def _listen():
    said = io.StringIO()
    deepspeed.utils.logger.handlers[0].setStream(said)
    return said


def _lines(said):
    return [line for line in said.getvalue().splitlines() if "moe_load_balancing" in line]


def _check_save(folder, section, layout):
    engine = _engine(section, **layout)
    _windows(engine, 2)
    engine.save_checkpoint(folder)
    return _previous_counts(engine) if section else None


def _check_load(folder, section, layout, load_arguments):
    """Load and train on; returns what was taken over and what was said, or DeepSpeed's refusal."""
    engine = _engine(section, **layout)
    said = _listen()
    try:
        path, client_state = engine.load_checkpoint(folder, **load_arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert path is not None
    is_on = engine.load_balancer is not None
    assert not is_on or "moe_load_balancing" not in client_state
    taken_over = _previous_counts(engine) if is_on else None
    losses = _windows(engine, 2, first=2)
    assert torch.tensor(losses).isfinite().all()
    return {"taken over": taken_over, "losses": losses, "said": _lines(said)}


def _load(folder, world_size, section=SECTION, layout=None, **load_arguments):
    return run_ranks(
        _check_load, world_size, str(folder), section, layout or {}, load_arguments, timeout_s=90.0
    )


# ------------------------------------------------------------------------------------------------
# Another layout

# Saved on 2 ranks with ep_size 2: world size and ep_size of the load, ZeRO stage, whether the
# optimizer's states are loaded too, and what DeepSpeed says where it refuses.
WORLD_SIZE_REFUSED = "ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2"
EP_SIZE_REFUSED = "ValueError: loaded state dict contains a parameter group that doesn't match"
LAYOUTS = [
    (4, 2, 0, True, None),
    (2, 1, 0, True, EP_SIZE_REFUSED),
    (2, 1, 0, False, None),
    (1, 1, 1, True, WORLD_SIZE_REFUSED),
    (1, 1, 1, False, None),
    (4, 4, 1, False, None),
]


@pytest.mark.parametrize(
    ("world_size", "ep_size", "zero_stage", "optimizer", "refusal"),
    LAYOUTS,
    ids=[f"world{w}-ep{ep}-zero{z}-{'with' if o else 'without'}" for w, ep, z, o, _ in LAYOUTS],
)
def test_another_world_size_or_ep_size(
    tmp_path, world_size, ep_size, zero_stage, optimizer, refusal
):
    """Counts are of the global batch and of global experts: no part of them is a rank's own."""
    saved = run_ranks(
        _check_save, 2, str(tmp_path), SECTION, {"ep_size": 2, "zero_stage": zero_stage}
    )
    layout = {"ep_size": ep_size, "zero_stage": zero_stage}
    results = _load(tmp_path, world_size, layout=layout, load_optimizer_states=optimizer)
    if refusal is not None:
        plain = _load(tmp_path, world_size, None, layout, load_optimizer_states=optimizer)
        assert all(result.startswith(refusal) for result in results + plain), (results, plain)
        return
    for result in results:
        assert not isinstance(result, str), result
        assert result["taken over"] == saved[0]
        assert result["said"] == []


# ------------------------------------------------------------------------------------------------
# Partial loads, and the plugin switched off


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_switched_off_on_resume_is_plain_deepspeed(tmp_path, zero_stage):
    run_ranks(_check_save, 2, str(tmp_path), SECTION, {"zero_stage": zero_stage})
    layout = {"zero_stage": zero_stage}
    off = _load(tmp_path, 2, {"enabled": False}, layout)
    assert off == _load(tmp_path, 2, None, layout)


def _check_client_state(folder):
    saved = _engine(SECTION)
    _windows(saved, 2)
    saved.save_checkpoint(folder, client_state={"epoch": 3})
    expected = _previous_counts(saved)
    plain = deepspeed.initialize(**_arguments(None))[0]
    there = set(plain.load_checkpoint(folder)[1])
    loaded = {}
    for section in (None, {"enabled": False}):
        engine = _engine(section)
        loaded[str(section)] = set(engine.load_checkpoint(folder)[1])
        assert engine.load_checkpoint(os.path.dirname(folder)) == (None, None)
    # Installed on an engine that was left off before, the plugin finds its own again.
    engine.load_checkpoint = _marked(engine.load_checkpoint)
    balancer = ds_moe_lb.install(engine, SECTION)
    assert "moe_load_balancing" not in engine.load_checkpoint(folder)[1]
    assert _previous_counts(engine) == expected
    balancer.uninstall()
    assert engine.load_checkpoint.is_the_scripts
    assert "moe_load_balancing" not in engine.load_checkpoint(folder)[1]
    return there, loaded


def _marked(method):
    def of_the_script(*args, **kwargs):
        return method(*args, **kwargs)

    of_the_script.is_the_scripts = True
    return of_the_script


def test_a_client_state_has_no_key_of_ours_where_the_plugin_is_off(tmp_path):
    """The key of a run with the plugin was handed out to a script that had switched it off.

    Uninstalling also took the script's own wrapper off the engine's methods.
    """
    for there, loaded in run_ranks(_check_client_state, 2, str(tmp_path / "saved"), timeout_s=90.0):
        theirs = there - {"moe_load_balancing"}
        assert "epoch" in theirs and theirs != there
        assert loaded == {"None": theirs, "{'enabled': False}": theirs}


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_weights_without_optimizer_states(tmp_path, zero_stage):
    """The window before belongs to the training that goes on, whose optimizer starts anew."""
    saved = run_ranks(_check_save, 2, str(tmp_path), SECTION, {"zero_stage": zero_stage})
    layout = {"zero_stage": zero_stage}
    for result in _load(tmp_path, 2, layout=layout, load_optimizer_states=False):
        assert result["taken over"] == saved[0] and result["said"] == []


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_weights_alone_begin_another_training(tmp_path, zero_stage):
    """load_module_only is a warm start on other data: no counts of the old run."""
    run_ranks(_check_save, 2, str(tmp_path), SECTION, {"zero_stage": zero_stage})
    layout = {"zero_stage": zero_stage}
    for result in _load(tmp_path, 2, layout=layout, load_module_only=True):
        assert result["taken over"] is None and result["said"] == []


# ------------------------------------------------------------------------------------------------
# State that does not fit


def _check_another_model(folder):
    """The counts of a model with other experts, in a checkpoint of this one."""
    other = _engine(SECTION, num_experts=(4, 4))
    _windows(other, 2)
    foreign = other.load_balancer.balance.state_dict()
    other.load_balancer.uninstall()
    engine = _engine(SECTION)
    _windows(engine, 1)
    engine.load_balancer.balance.state_dict = lambda: foreign
    engine.save_checkpoint(folder)
    resumed = _engine(SECTION)
    said = _listen()
    resumed.load_checkpoint(folder)
    assert _previous_counts(resumed) is None
    _windows(resumed, 2)
    assert _previous_counts(resumed) is not None  # from the second window on as ever
    return _lines(said)


def test_the_state_of_another_model_is_left_alone_with_a_warning(tmp_path):
    first, second = run_ranks(_check_another_model, 2, str(tmp_path), timeout_s=90.0)
    (line,) = first
    assert "belongs to another model and was left alone" in line
    assert second == []


def _check_expert_parallel_groups(folder):
    section = {"estimate": "boundary", "sync_group": "expert_parallel"}
    engine = _engine(section, ep_size=2)
    _windows(engine, 2)
    engine.save_checkpoint(folder)
    own = _previous_counts(engine)
    resumed = _engine(section, ep_size=2)
    resumed.load_checkpoint(folder)
    before = _previous_counts(resumed)
    _windows(resumed, 1)
    return own, before, _previous_counts(resumed) is not None


def test_counts_of_smaller_groups_are_not_saved_and_the_first_window_is_running(tmp_path):
    """DeepSpeed saves one client state; with rank 0's counts everybody would balance its group."""
    results = run_ranks(_check_expert_parallel_groups, 4, str(tmp_path), timeout_s=90.0)
    assert results[0][0] == results[1][0] != results[2][0] == results[3][0]
    assert [result[1:] for result in results] == [(None, True)] * 4


# ------------------------------------------------------------------------------------------------
# Universal checkpoints


def _check_convert(folder, output):
    """DeepSpeed's converter, in a process of its own; returns its files or its failure."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = argparse.Namespace(
        input_folder=folder,
        output_folder=output,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return sorted(
        os.path.relpath(os.path.join(where, name), output)
        for where, _, names in os.walk(output)
        for name in names
    )


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_universal_converter_does_what_it_does_without_the_plugin(tmp_path, zero_stage):
    """It fails on native MoE; with our state in the checkpoint it must fail in the same place."""
    outcomes = {}
    for name, section in (("with", SECTION), ("without", None)):
        folder = tmp_path / name
        run_ranks(_check_save, 2, str(folder), section, {"ep_size": 2, "zero_stage": zero_stage})
        tag = (folder / "latest").read_text()
        (outcome,) = run_ranks(
            _check_convert, 1, str(folder / tag), str(folder / "universal"), timeout_s=90.0
        )
        outcomes[name] = re.sub(re.escape(str(folder)), "FOLDER", str(outcome))
    assert outcomes["with"] == outcomes["without"]
    print(outcomes["with"])


# ------------------------------------------------------------------------------------------------
# A rank that dies while it writes


def _check_dies_while_writing(folder, marker, section):
    """Rank 1 dies in the middle of its part of the second checkpoint."""
    engine = _engine(section)
    _windows(engine, 1)
    engine.save_checkpoint(folder, tag="first")
    _windows(engine, 1, first=1)
    if dist.get_rank() == 1:
        engine.checkpoint_engine.save = lambda state, path: _die_in_the_middle(path, folder, marker)
    engine.save_checkpoint(folder, tag="second")


def _die_in_the_middle(path, folder, marker):
    with open(path, "wb") as file:
        file.write(b"half of a checkpoint")
    time.sleep(2.0)  # rank 0 has long written its own
    with open(marker, "w") as file, open(os.path.join(folder, "latest")) as latest:
        file.write(latest.read())
    os.abort()


def test_a_rank_that_dies_writing_leaves_latest_at_the_last_complete_checkpoint(tmp_path):
    """DeepSpeed's rank 0 writes `latest` when its own part is there, not behind the barrier that
    ends the save: without the plugin it names a checkpoint whose other parts never came.
    """
    for name, section, left in (("with", SECTION, "first"), ("without", None, "second")):
        folder, marker = tmp_path / name, tmp_path / f"latest_{name}"
        with pytest.raises(RankError, match="rank 1 failed first"):
            run_ranks(_check_dies_while_writing, 2, str(folder), str(marker), section)
        assert marker.read_text() == left
        for result in _load(folder, 2, section, tag=None if section else "first"):
            assert isinstance(result, dict), result


def _check_latest(folder):
    """What `latest` says to every rank right behind each save, and what DeepSpeed was asked."""
    engine = _engine(SECTION)
    _windows(engine, 1)
    asked, seen = [], []
    create = engine.checkpoint_engine.create

    def watched(info):
        asked.append(info.save_latest)
        create(info)

    engine.checkpoint_engine.create = watched
    latest = os.path.join(folder, "latest")
    for arguments, options in (
        ((), {"save_latest": False}),
        (("first", {}, False), {}),
        ((), {}),
        ((7,), {"client_state": {"epoch": 3}}),
        (("third", None, True, False), {}),
    ):
        engine.save_checkpoint(folder, *arguments, **options)
        seen.append(open(latest).read() if os.path.exists(latest) else None)
        dist.barrier()
    assert engine.load_checkpoint(folder, tag="7")[1]["epoch"] == 3
    engine.checkpoint_engine.is_decoupled = lambda: True  # the save would end in the background
    engine.save_checkpoint(folder, tag="later")
    seen.append(open(latest).read())
    return seen, asked, sorted(os.listdir(folder))


def test_latest_is_moved_on_as_deepspeed_would_have(tmp_path):
    """An asynchronous checkpoint engine moves it on by itself when its save has ended."""
    for seen, asked, names in run_ranks(_check_latest, 2, str(tmp_path), timeout_s=90.0):
        assert seen == [None, None, "global_step1", "7", "third", "third"]
        assert asked == [False] * 5 + [True]
        assert not [name for name in names if name.endswith(".part")]

"""On a live engine: refusals, what the user sees, checkpoints, and disagreeing ranks."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe import sharded_moe
from deepspeed.moe.sharded_moe import TopKGate
from torch import nn

import ds_moe_lb
from ds_moe_lb.report.sources import find_logs
from models import MODEL_DIM, TinyMoE, moe_param_groups
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def _config(section=None, *, gas=2, **extra):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **extra,
    }
    if section is not None:
        config["moe_load_balancing"] = section
    return config


def _engine(section=None, *, model=None, gas=2, ep_size=1, k=2, **extra):
    torch.manual_seed(7)
    model = model or TinyMoE(k=k, ep_size=ep_size)
    return ds_moe_lb.initialize(
        model=model,
        model_parameters=moe_param_groups(model),
        config=_config(section, gas=gas, **extra),
    )[0]


def _batch(seed):
    return torch.randn(2, 4, MODEL_DIM, generator=torch.Generator().manual_seed(seed))


def _micro_step(engine, seed, coeff=0.1):
    prediction, losses = engine(_batch(seed))
    engine.backward(prediction.square().mean() + coeff * sum(losses))
    engine.step()
    return [float(loss) for loss in losses]


def _weights(engine):
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------
# What install says and refuses


def _check_announcement(section, gas):
    said = io.StringIO()
    with redirect_stdout(said):
        _engine(section, gas=gas, ep_size=2)
    return [line for line in said.getvalue().splitlines() if "moe_load_balancing:" in line]


@pytest.mark.parametrize(
    ("section", "collectives"),
    [
        ({}, 8),  # two layers, four micro-steps
        ({"aux_loss_coeff": 0.1}, 4),  # all layers together, once a micro-step
        ({"estimate": "boundary"}, 1),
        ({"estimate": "boundary", "aux_loss_coeff": 0.1}, 1),
        ({"aux_loss_coeff": 0.0}, 0),
        ({"aux_loss_coeff": 0.0, "bias_update_rate": 0.1}, 1),
    ],
)
def test_one_line_on_rank_0_states_what_was_installed(section, collectives):
    first, second = run_ranks(_check_announcement, 2, section, 4)
    assert second == []
    (line,) = first
    assert "2 MoE layers (E=8 k=2, E=12 k=2), scope global_batch" in line
    assert "D x G = 2 x 4, balance batch size 16 sequences" in line
    assert f"{collectives} count collectives per optimizer step" in line


def _check_counted_collectives(section, gas):
    engine = _engine(section, gas=gas, ep_size=2)
    reducer = engine.load_balancer.balance.reducer
    for seed in range(gas):  # the first window, in which `boundary` runs as `running`
        _micro_step(engine, seed, coeff=0.0 if "aux_loss_coeff" in section else 0.1)
    before = reducer.num_collectives
    for seed in range(gas):
        _micro_step(engine, seed, coeff=0.0 if "aux_loss_coeff" in section else 0.1)
    return reducer.num_collectives - before


@pytest.mark.parametrize(
    ("section", "collectives"),
    [
        ({}, 8),
        ({"aux_loss_coeff": 0.1}, 4),
        ({"estimate": "boundary"}, 1),
        ({"estimate": "boundary", "aux_loss_coeff": 0.1}, 1),
        ({"aux_loss_coeff": 0.0}, 0),
        ({"aux_loss_coeff": 0.0, "bias_update_rate": 0.1}, 1),
        ({"scope": "micro_batch"}, 0),
        ({"scope": "none"}, 0),
    ],
)
def test_the_announced_collectives_are_those_that_are_made(section, collectives):
    assert run_ranks(_check_counted_collectives, 2, section, 4) == [collectives] * 2


def _check_refusals(tmp):
    refused = {}

    def attempt(name, build):
        try:
            build()
        except (ValueError, RuntimeError) as error:
            refused[name] = f"{type(error).__name__}: {error}"
        else:
            refused[name] = "accepted"

    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def no_moe():
        ds_moe_lb.initialize(
            model=dense, model_parameters=dense.parameters(), config=_config({"scope": "none"})
        )

    def own_gate():
        class OwnGate(TopKGate):
            pass

        model = TinyMoE(k=2)
        model.gates()[1].__class__ = OwnGate
        _engine({}, model=model)

    def misspelt():
        model = TinyMoE(k=2)
        ds_moe_lb.initialize(
            model=model,
            model_parameters=moe_param_groups(model),
            config=_config(None, moe_load_balancng={"scope": "global_batch"}),
        )

    attempt("no MoE", no_moe)
    attempt("own gate", own_gate)
    attempt("misspelt section", misspelt)
    attempt("bad value", lambda: _engine({"scope": "golbal_batch"}))
    attempt("picture without TensorBoard", lambda: _engine({"monitor": {"image_interval": 5}}))
    engine = _engine({})
    attempt("compile", engine.compile)
    attempt("twice", lambda: ds_moe_lb.install(engine))
    attempt("mask type", lambda: engine.load_balancer.token_mask(torch.ones(8)).__enter__())

    def short_mask():
        with engine.load_balancer.token_mask(torch.ones(2, 3, dtype=torch.bool)):
            engine(_batch(0))

    attempt("mask size", short_mask)
    return refused


def test_every_refusal_is_one_clear_error(tmp_path):
    (refused,) = run_ranks(_check_refusals, 1, str(tmp_path))
    expected = {
        "no MoE": "NothingToBalanceError: .*Sequential.* has no deepspeed.moe.layer.MoE layers",
        "own gate": "ValueError: .*MoE layer 'blocks.1.moe.deepspeed_moe' is a .*OwnGate",
        "misspelt section": "ValueError: .*'moe_load_balancng' is unknown",
        "bad value": "ValueError: .*scope: got 'golbal_batch'.*nearest: 'global_batch'",
        "picture without TensorBoard": "ValueError: .*image_interval: got 5, but pictures go to T",
        "compile": r"RuntimeError: .*engine.compile\(\) is not supported",
        "twice": "RuntimeError: .*already installed",
        "mask type": r"ValueError: .*got torch.float32, expected a bool tensor",
        "mask size": r"ValueError: .*token_mask has 6 entries \(shape \(2, 3\)\), but the router "
        r"of layer 'blocks.0.moe' got 8 tokens",
    }
    assert set(refused) == set(expected)
    for name, pattern in expected.items():
        assert re.match(pattern, refused[name]), f"{name}: {refused[name]}"


def _check_warnings(case):
    said = io.StringIO()
    handler = deepspeed.utils.logger.handlers[0]
    handler.setStream(said)
    if case == "one rank, one step":
        engine = _engine({}, gas=1)
    elif case == "frozen":
        model = TinyMoE(k=2)
        model.gates()[1].wg.weight.requires_grad_(False)
        params = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
        engine = ds_moe_lb.initialize(
            model=model,
            model_parameters=deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
                params
            ),
            config=_config({"aux_loss_coeff": 0.1}),
        )[0]
    else:
        engine = _engine({})
    for seed in range(4):
        _micro_step(engine, seed, coeff=0.0 if case == "frozen" else 0.1)
    if case == "l_aux unused":
        engine = _engine({})
        for seed in range(4):
            prediction, _ = engine(_batch(seed))
            engine.backward(prediction.square().mean())
            engine.step()
    return [line for line in said.getvalue().splitlines() if "moe_load_balancing" in line]


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("one rank, one step", "D x G is 1"),
        ("frozen", "routers of blocks.1.moe are frozen"),
        ("l_aux unused", "no l_aux received a gradient in the first window"),
        ("nothing wrong", None),
    ],
)
def test_warnings_come_once_and_only_with_a_reason(case, pattern):
    (lines,) = run_ranks(_check_warnings, 1, case)
    if pattern is None:
        assert lines == []
    else:
        assert len(lines) == 1 and pattern in lines[0], lines


def _check_host(monkey):
    from ds_moe_lb import _compat

    engine = _engine(None)
    if monkey == "version":
        _compat.TESTED["deepspeed"] = ("0.1", "0.2")
        return _compat.check_host(engine)
    _compat._ENGINE_NAMES["no_such_name"] = "a test"
    try:
        ds_moe_lb.install(engine)
    except RuntimeError as error:
        return str(error)


def test_host_is_checked_at_install():
    (warnings,) = run_ranks(_check_host, 1, "version")
    assert len(warnings) == 1 and "deepspeed 0." in warnings[0] and "< 0.2" in warnings[0]
    (message,) = run_ranks(_check_host, 1, "missing")
    assert "lacks no_such_name (a test)" in message and "Tested: deepspeed" in message


# ------------------------------------------------------------------------------------------------
# Live engines


def _check_install_on_live_engine():
    engine = _engine(None)
    plain_keys = list(engine.module.state_dict())
    assert engine.load_balancer is None
    wrapped = ("step", "save_checkpoint", "load_checkpoint", "compile")
    methods = {name: engine.__dict__.get(name) for name in wrapped}
    assert [name for name in wrapped if methods[name]] == ["load_checkpoint"]
    _micro_step(engine, 0)
    balancer = ds_moe_lb.install(engine, {"estimate": "boundary"})
    assert engine.load_balancer is balancer and balancer.config.estimate == "boundary"
    assert list(engine.module.state_dict()) == plain_keys
    for seed in range(1, 5):
        _micro_step(engine, seed)
    assert balancer.metrics()["lbl_used"] > 0
    balancer.uninstall()
    assert engine.load_balancer is None
    assert methods == {name: engine.__dict__.get(name) for name in wrapped}
    assert all(type(gate) is TopKGate for gate in engine.module.gates())
    assert sharded_moe.F is torch.nn.functional
    _micro_step(engine, 6)
    assert ds_moe_lb.install(engine, {"enabled": False}) is None
    assert ds_moe_lb.install(engine) is engine.load_balancer
    engine.load_balancer.uninstall()


def test_install_and_uninstall_on_a_live_engine():
    run_ranks(_check_install_on_live_engine, 2)


# ------------------------------------------------------------------------------------------------
# Checkpoints


def _check_resume(folder, section):
    coeff = 0.0 if "aux_loss_coeff" in section else 0.1
    straight = _engine(section, ep_size=2)
    for seed in range(4):
        _micro_step(straight, seed, coeff)
    straight.save_checkpoint(folder, client_state={"epoch": 3})
    tail = [_micro_step(straight, seed, coeff) for seed in range(4, 8)]
    expected = _weights(straight)
    resumed = _engine(section, ep_size=2)
    _micro_step(resumed, 99, coeff)  # half a window that the loaded checkpoint makes void
    path, client_state = resumed.load_checkpoint(folder)
    assert path is not None
    assert client_state["epoch"] == 3 and "moe_load_balancing" not in client_state
    resumed.micro_steps = 0  # DeepSpeed saves none: the loop starts at a boundary
    resumed.optimizer.zero_grad()
    again = [_micro_step(resumed, seed, coeff) for seed in range(4, 8)]
    assert again == tail
    assert _same(expected, _weights(resumed))


@pytest.mark.parametrize(
    "section", [{"estimate": "boundary"}, {"estimate": "boundary", "aux_loss_coeff": 0.5}, {}]
)
def test_resume_at_a_boundary_is_bit_identical(tmp_path, section):
    run_ranks(_check_resume, 2, str(tmp_path), section)


def _check_resume_inside_a_window(folder):
    engine = _engine({"estimate": "boundary"}, gas=2)
    for seed in range(3):
        _micro_step(engine, seed)
    engine.save_checkpoint(folder)
    said = io.StringIO()
    deepspeed.utils.logger.handlers[0].setStream(said)
    resumed = _engine({"estimate": "boundary"}, gas=2)
    resumed.load_checkpoint(folder)
    assert all(int(counts.sum()) == 0 for counts in resumed.load_balancer.counts().values())
    return said.getvalue()


def test_resuming_inside_a_window_begins_a_new_one_and_says_so(tmp_path):
    first, second = run_ranks(_check_resume_inside_a_window, 2, str(tmp_path))
    assert "the checkpoint was saved 1 micro-steps into an accumulation window" in first
    assert "moe_load_balancing" not in second


def _check_old_checkpoint(folder):
    plain = _engine(None)
    for seed in range(2):
        _micro_step(plain, seed)
    plain.save_checkpoint(folder)
    engine = _engine({"estimate": "boundary"})
    engine.load_checkpoint(folder)
    first_window = [_micro_step(engine, seed) for seed in range(2)]
    assert engine.load_balancer.balance.previous is not None
    engine.save_checkpoint(folder)
    without = _engine(None)
    path, client_state = without.load_checkpoint(folder)
    assert path is not None
    return first_window


def test_checkpoints_cross_over_between_with_and_without_the_plugin(tmp_path):
    first, second = run_ranks(_check_old_checkpoint, 2, str(tmp_path))
    assert len(first) == 2


# ------------------------------------------------------------------------------------------------
# Ranks that disagree


def _check_different_models():
    model = TinyMoE(k=2, num_experts=(8, 12) if dist.get_rank() == 0 else (8, 8))
    try:
        _engine({"scope": "none"}, model=model)
    except RuntimeError as error:
        return str(error)


def _check_different_config():
    try:
        _engine({"estimate": "running" if dist.get_rank() == 0 else "boundary"})
    except RuntimeError as error:
        return str(error)


def test_ranks_with_different_layers_or_config_are_refused_at_install():
    """gloo pairs collectives of different ranks in silence and returns wrong sums."""
    for message in run_ranks(_check_different_config, 2):
        assert "rank 1 has config" in message and "'boundary'" in message


def _check_skipped_layer(native):
    section = {} if native else {"aux_loss_coeff": 0.1}
    model = TinyMoE(k=2, num_experts=(8, 8, 8))
    engine = _engine(section, model=model, zero_optimization={"stage": 0})
    if dist.get_rank() == 1:
        model.blocks[1].forward = lambda x, used_token: (x, x.new_zeros(()))
        if native:  # as many collectives as the others, of other layers
            last = model.blocks[2]
            whole = last.forward

            def twice(x, used_token):
                whole(x, used_token)
                return whole(x, used_token)

            last.forward = twice
    try:
        for seed in range(2):
            prediction, losses = engine(_batch(seed))
            engine.backward(prediction.square().mean() + 0.0 * sum(losses))
            engine.step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("native", [True, False])
def test_a_layer_that_one_rank_skips_is_named(native):
    messages = run_ranks(_check_skipped_layer, 2, native)
    for message in messages:
        assert re.search(r"the ranks \[0, 1\] disagree at layer 'blocks.[12].moe'", message)
        assert "rank 0 " in message and "rank 1 " in message
        assert "micro-step 1, call 1 of layer 'blocks.1.moe'" in message
    if not native:  # one message for all layers: rank 1 says that it made no call
        assert all(
            re.search("rank 1 .*call 0 of layer 'blocks.1.moe'", message) for message in messages
        )


# ------------------------------------------------------------------------------------------------
# Watching it


def _check_monitor(folder, section, gas, pictures):
    monitor = {"detail": "expert", "image_interval": 1 if pictures else 0}
    section = {**section, "monitor": {**monitor, **section.get("monitor", {})}}
    engine = _engine(
        section,
        gas=gas,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "csv"},
        tensorboard={"enabled": True, "output_path": folder, "job_name": "tb"},
    )
    native = "aux_loss_coeff" not in section
    reports = []
    for seed in range(3 * gas):
        _micro_step(engine, seed, coeff=0.1 if native else 0.0)
        reports.append(engine.load_balancer.metrics())
    return reports


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"estimate": "boundary"},
        {"aux_loss_coeff": 0.1},
        {"aux_loss_coeff": 0.1, "estimate": "boundary"},
        {"aux_loss_coeff": 0.0},
        {"scope": "micro_batch"},
        {"scope": "micro_batch", "aux_loss_coeff": 0.1},
        {"scope": "none"},
    ],
)
def test_reports_in_every_scope(tmp_path, section):
    results = run_ranks(_check_monitor, 2, str(tmp_path), section, 2, False)
    assert results[0] == results[1]
    reports = results[0]
    assert reports[0] == {} and reports[1] == reports[2] != reports[3]
    last = reports[-1]
    # 2 ranks x 2 micro-steps x 8 tokens; every token makes k = 2 selections
    assert last["valid_tokens"] == 32 and last["valid_tokens/layer_01"] == 32
    rows = (tmp_path / "csv").glob("Train_Samples_moe_load_layer_*_expert_*.csv")
    loads = {}
    for path in rows:
        layer = re.search(r"layer_(\d+)", path.name).group(1)
        loads.setdefault(layer, []).append(float(path.read_text().splitlines()[-1].split(",")[1]))
    assert {layer: (len(load), sum(load)) for layer, load in loads.items()} == {
        "00": (8, 64.0),
        "01": (12, 64.0),
    }
    for name in ("lbl_global_batch", "lbl_micro_batch", "load_entropy", "dead_experts"):
        mean = (last[f"{name}/layer_00"] + last[f"{name}/layer_01"]) / 2
        assert last[name] == pytest.approx(mean)
    no_loss = section.get("scope") == "none" or section.get("aux_loss_coeff") == 0.0
    assert ("lbl_used" in last) is not no_loss
    if section.get("scope") == "micro_batch":
        assert last["lbl_used"] == pytest.approx(last["lbl_micro_batch"], rel=1e-5)
    for kind, rel in (("csv", 1e-12), ("tb", 1e-6)):  # TensorBoard keeps fp32
        (log,) = find_logs([tmp_path / kind])
        for name, value in last.items():
            metric, _, layer = name.partition("/layer_")
            series = log.get(metric, int(layer) if layer else None)
            assert series is not None and series.values[-1] == pytest.approx(value, rel=rel)
            assert series.at.tolist() == [8, 16, 24]
        assert log.expert_table(1)[1].sum(axis=0).tolist() == [64.0] * 3
    # global_samples is the abscissa: 3 steps of 8 sequences
    steps = (tmp_path / "csv" / "Train_Samples_moe_max_violation_global_batch.csv").read_text()
    assert [line.split(",")[0] for line in steps.splitlines()[1:]] == ["8", "16", "24"]


def test_used_loss_is_the_same_however_it_is_made(tmp_path):
    """The reported value of the loss does not depend on who adds it."""
    used = {}
    for name, section in {"native": {}, "injected": {"aux_loss_coeff": 0.1}}.items():
        reports = run_ranks(_check_monitor, 2, str(tmp_path / name), section, 2, False)[0]
        used[name] = reports[1]["lbl_used"]
    assert used["native"] == pytest.approx(used["injected"], rel=1e-5)


def _check_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _check_monitor(folder, {"monitor": {"interval": 2}}, 1, True)
    if dist.get_rank() == 0:
        events = EventAccumulator(str(Path(folder) / "tb"))
        events.Reload()
        tags = events.Tags()
        steps = [e.step for e in events.Scalars("Train/Samples/moe/lbl_used")]
        return tags["images"], steps, [len(events.Images(tag)) for tag in tags["images"]]


def test_tensorboard_gets_scalars_and_the_heat_map(tmp_path):
    images, steps, pictures = run_ranks(_check_events, 2, str(tmp_path))[0]
    assert images == ["Train/Samples/moe/expert_load"] and pictures == [1]
    assert steps == [8]  # interval 2: the second of three steps, 4 sequences each

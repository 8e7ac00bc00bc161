"""Conversion of whole checkpoints: what transformers computes, and what is left on disk."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dense_models import LAYERS, NEURONS, VOCABULARY, load_moe, logits, save_dense
from ds_moe_lb.cli import EXIT_USAGE, main
from ds_moe_lb.convert.conversion import Conversion
from ds_moe_lb.convert.plan import ConversionOptions

SHARED = {"num_shared_experts": 2}
# Dense family, its own fields, options of the conversion, the class that comes out.
FAMILIES = {
    "llama": ("llama", {}, {}, "MixtralForCausalLM"),
    "llama_shared": ("llama", {}, SHARED, "Qwen2MoeForCausalLM"),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 8}, {}, "MixtralForCausalLM"),
    "mistral_shared": ("mistral", {"sliding_window": 5}, SHARED, "Qwen2MoeForCausalLM"),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}, "Qwen2MoeForCausalLM"),
    "qwen2_shared": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        SHARED,
        "Qwen2MoeForCausalLM",
    ),
    "qwen3": ("qwen3", {"head_dim": 8, "attention_bias": True}, {}, "Qwen3MoeForCausalLM"),
}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A tiny Llama in one file."""
    save_dense(tmp_path / "dense", "llama")
    return tmp_path / "dense"


def _convert(source: Path, output: Path, **options: Any) -> Path:
    plan = ConversionOptions(**{"num_experts": 4, "top_k": 2, **options})
    Conversion(source, output, plan).run()
    return output


@pytest.mark.parametrize("name", FAMILIES)
def test_all_experts_at_the_exact_scale_are_the_dense_model(name: str, tmp_path: Path) -> None:
    """k = E with a router of zeros weighs each expert 1/E, which the scale E undoes."""
    model_type, fields, options, architecture = FAMILIES[name]
    expected = logits(save_dense(tmp_path / "dense", model_type, **fields))
    path = _convert(
        tmp_path / "dense", tmp_path / "moe", top_k=4, scale="exact", gate_init="zero", **options
    )
    model = load_moe(path)
    assert type(model).__name__ == architecture
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", ["paper", "unit"])
def test_all_experts_at_another_scale_are_not(scale: str, dense: Path, tmp_path: Path) -> None:
    """With k = E the paper's factor E/k is 1, and the FFN comes out divided by E."""
    reference = logits(_dense_model(dense))
    path = _convert(dense, tmp_path / "moe", top_k=4, scale=scale, gate_init="zero")
    model = load_moe(path)
    assert (logits(model) - reference).abs().max() > 1e-2
    # By hand: four times the FFN's output is the dense one again.
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data *= 4
    torch.testing.assert_close(logits(model), reference, rtol=0, atol=1e-12)


def test_experts_of_every_scale_sum_to_the_ffn_times_the_scale(dense: Path, tmp_path: Path) -> None:
    """With k < E: the down_proj columns in the file are those of the dense model times E/k."""
    down_proj = load_file(dense / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    path = _convert(dense, tmp_path / "moe", scale="paper")
    tensors = load_file(path / "model.safetensors")
    block = "model.layers.1.block_sparse_moe.experts"
    columns = torch.cat([tensors[f"{block}.{expert}.w2.weight"] for expert in range(4)], dim=1)
    expected = down_proj * (4 / 2)
    # As sets of columns: the split decides their order.
    assert sorted(columns.T.tolist()) == sorted(expected.T.tolist())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weights_of_the_selected_experts_sum_to_one(name: str, tmp_path: Path) -> None:
    """What every scale is defined by; Qwen's MoE families do not do it by themselves."""
    model_type, fields, _, _ = FAMILIES[name]
    save_dense(tmp_path / "dense", model_type, **fields)
    model = load_moe(_convert(tmp_path / "dense", tmp_path / "moe", gate_std=1.0))
    hidden = torch.randn(5, 16, dtype=torch.float64)
    for layer in model.model.layers:
        _, weights, experts = layer.mlp.gate(hidden)
        assert experts.shape == (5, 2)
        torch.testing.assert_close(weights.sum(dim=1).double(), torch.ones(5).double())


def test_empty_shared_expert_of_qwen2_stays_empty(tmp_path: Path) -> None:
    """Qwen2-MoE has no layout without a shared expert; the one of zeros is no free parameter."""
    save_dense(tmp_path / "dense", "qwen2")
    model = load_moe(_convert(tmp_path / "dense", tmp_path / "moe")).train()
    tokens = torch.arange(12)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    for layer in model.model.layers:
        block = layer.mlp
        empty = [*block.shared_expert.parameters(), *block.shared_expert_gate.parameters()]
        assert len(empty) == 4
        assert all(not p.any() and not p.grad.any() for p in empty)
        assert block.experts.down_proj.grad.any()


def test_shards_are_converted_one_by_one(tmp_path: Path) -> None:
    """Each file holds what came from the file of the same name, and together they are complete."""
    expected = logits(save_dense(tmp_path / "dense", "llama", shard_size="10KB"))
    steps: list[tuple[int, str]] = []
    plan = ConversionOptions(num_experts=4, top_k=4, scale="exact", gate_init="zero")
    conversion = Conversion(tmp_path / "dense", tmp_path / "moe", plan)
    conversion.run(on_progress=lambda done, what: steps.append((done, what)))
    files = sorted(path.name for path in (tmp_path / "dense").glob("*.safetensors"))
    assert len(files) >= 3
    assert files == sorted(path.name for path in (tmp_path / "moe").glob("*.safetensors"))
    for file in files:
        before, after = (set(_names(tmp_path / folder / file)) for folder in ("dense", "moe"))
        assert {name for name in after if ".block_sparse_moe." not in name} == {
            name for name in before if ".mlp." not in name
        }
        layers_before = {name.split(".")[2] for name in before if ".mlp." in name}
        assert {name.split(".")[2] for name in after if "block_sparse" in name} == layers_before
    index = json.loads((tmp_path / "moe" / "model.safetensors.index.json").read_text())
    sizes = [
        tensor.nbytes for file in files for tensor in load_file(tmp_path / "moe" / file).values()
    ]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len(index["weight_map"]) == len(sizes)
    assert [done for done, _ in steps] == list(range(1, LAYERS + len(files) + 1))
    assert steps[-1][0] == conversion.num_steps
    torch.testing.assert_close(logits(load_moe(tmp_path / "moe")), expected, rtol=0, atol=1e-12)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(
    error: type[BaseException], tmp_path: Path
) -> None:
    save_dense(tmp_path / "dense", "llama", shard_size="10KB")
    plan = ConversionOptions(num_experts=4, top_k=2)
    conversion = Conversion(tmp_path / "dense", tmp_path / "moe", plan)

    def interrupt(done: int, what: str) -> None:
        assert not (tmp_path / "moe").exists()
        if done == LAYERS + 2:
            partial = [path for path in tmp_path.iterdir() if path.name.startswith(".moe")]
            assert len(list(partial[0].glob("*.safetensors"))) == 2  # it has got somewhere
            raise error

    with pytest.raises(error):
        conversion.run(on_progress=interrupt)
    assert os.listdir(tmp_path) == ["dense"]


def test_a_killed_conversion_leaves_no_checkpoint(tmp_path: Path, dense: Path) -> None:
    """What stays under the hidden name has no config, so nothing takes it for a model."""
    plan = ConversionOptions(num_experts=4, top_k=2)
    pid = os.fork()
    if pid == 0:
        try:
            Conversion(dense, tmp_path / "moe", plan).run(
                on_progress=lambda done, what: os._exit(9) if "written" in what else None
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    (partial,) = (path for path in tmp_path.iterdir() if path != dense)
    assert partial.name.startswith(".moe.partial-")
    assert [path.name for path in partial.iterdir()] == ["model.safetensors"]
    assert load_moe(_convert(dense, tmp_path / "moe"))  # it is in nobody's way


def test_an_existing_folder_is_never_written_into(dense: Path, tmp_path: Path) -> None:
    for number, make in enumerate((Path.mkdir, Path.touch, lambda path: path.symlink_to("none"))):
        output = tmp_path / f"taken{number}"
        make(output)
        with pytest.raises(ValueError, match="exists already: remove it or give another"):
            _convert(dense, output)
    plan = ConversionOptions(num_experts=4, top_k=2)
    conversion = Conversion(dense, tmp_path / "late", plan)
    # After all earlier checks; renaming would replace an empty folder in silence.
    with pytest.raises(ValueError, match="exists already"):
        conversion.run(
            on_progress=lambda done, what: (
                (tmp_path / "late").mkdir() if what.endswith("written") else None
            )
        )
    assert os.listdir(tmp_path / "late") == []


def test_companions_are_copied_and_the_model_card_is_not(dense: Path, tmp_path: Path) -> None:
    copied = ("tokenizer.json", "tokenizer_config.json", "LICENSE", "chat_template.jinja")
    for name in (*copied, "README.md"):
        (dense / name).write_text(name)
    path = _convert(dense, tmp_path / "moe")
    for name in (*copied, "generation_config.json"):
        assert (path / name).read_bytes() == (dense / name).read_bytes()
    record = json.loads((path / "conversion.json").read_text())
    assert record["options"]["top_k"] == 2 and record["neurons_per_expert"] == NEURONS // 4
    assert {p.name for p in path.iterdir()} == {
        *copied,
        "generation_config.json",
        "config.json",
        "conversion.json",
        "model.safetensors",
    }


def test_dtype_is_kept_and_a_power_of_two_is_exact(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = save_dense(tmp_path / "fp32", "llama").bfloat16()
    model.save_pretrained(tmp_path / "dense")
    path = _convert(tmp_path / "dense", tmp_path / "moe", scale="exact")
    down_proj = load_file(tmp_path / "dense/model.safetensors")[
        "model.layers.0.mlp.down_proj.weight"
    ]
    tensors = load_file(path / "model.safetensors")
    experts = [tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"] for e in range(4)]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sorted(torch.cat(experts, dim=1).T.tolist()) == sorted((down_proj * 4).T.tolist())
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16


def test_a_scale_that_leaves_the_dtype_is_refused(dense: Path, tmp_path: Path) -> None:
    file = dense / "model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(file).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 30_000.0
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"w2\.weight: times 4 .* range of torch\.float16"):
        _convert(dense, tmp_path / "moe", scale="exact")
    assert os.listdir(tmp_path) == ["dense"]


@pytest.mark.parametrize(
    ("model_type", "fields", "options", "message"),
    [
        ("gpt2", {}, {}, "model_type in config.json: got 'gpt2', expected one of llama"),
        ("llama", {"mlp_bias": True}, {}, "mlp_bias in config.json: got true"),
        ("llama", {"attention_bias": True}, {}, "attention_bias in config.json: got true"),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act in config.json: got 'gelu'"),
        ("qwen3", {}, SHARED, "--num-shared-experts: got 2, expected 0 for a Qwen3 model"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            {},
            "layer_types in config.json: got sliding_attention",
        ),
        ("llama", {}, {"num_experts": 5}, "48 neurons .* which 5 does not divide"),
    ],
)
def test_models_that_no_target_computes_are_refused(
    model_type: str, fields: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_dense(tmp_path / "dense", model_type, **fields)
    with pytest.raises(ValueError, match=message):
        _convert(tmp_path / "dense", tmp_path / "moe", **options)
    assert os.listdir(tmp_path) == ["dense"]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def _drop_tensor(file: Path) -> None:
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)


def _store_integers(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
        torch.int8
    )
    save_file(tensors, file)


def _store_another_shape(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, file)


def _shorten(file: Path) -> None:
    """transformers loads the rest with a warning; the conversion ended in an IndexError."""
    path = file.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "expected model.safetensors or model.safetensors.index.json"),
        (_truncate, "expected a complete safetensors file, but .* fetch it again"),
        (_drop_tensor, r"expected the tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (_store_another_shape, r"has the shape \[3, 5\], expected \[48, 16\]"),
        (_store_integers, r"got the dtype torch\.int8, expected one of torch\.float32"),
        (lambda file: (file.parent / "config.json").unlink(), "it has no config.json"),
        (_shorten, r"got the tensor model\.layers\.1\.mlp\..*, expected 1 layers by"),
    ],
)
def test_damaged_checkpoints_are_refused(
    damage: Callable[[Path], Any], message: str, dense: Path, tmp_path: Path
) -> None:
    damage(dense / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        _convert(dense, tmp_path / "moe")
    assert os.listdir(tmp_path) == ["dense"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_dense(tmp_path / "dense", "llama", shard_size="10KB")
    next((tmp_path / "dense").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"index names the shard model-00002.* not there"):
        _convert(tmp_path / "dense", tmp_path / "moe")


def test_importance_of_a_model_is_that_of_plain_autograd(dense: Path) -> None:
    """h and dL/dh of layer 1, taken apart by hand from a forward of the whole model."""
    from ds_moe_lb.convert.importance import domain_importance

    model = _dense_model(dense)
    tokens = torch.arange(20).view(2, 10)
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        inputs[0].retain_grad()
        kept.append(inputs[0])

    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(keep)
    log_probs = model(input_ids=tokens).logits.float()[:, :-1].log_softmax(-1)
    (-log_probs.gather(2, tokens[:, 1:, None]).sum()).backward()
    hook.remove()
    (hidden,) = kept
    assert hidden.grad is not None
    expected = (hidden * hidden.grad).abs().mean(dim=(0, 1))
    scores = domain_importance(model, [tokens[:1], tokens[1:]])
    assert scores.shape == (LAYERS, NEURONS)
    torch.testing.assert_close(scores[1], expected.detach().double(), rtol=1e-5, atol=1e-8)


def test_command_splits_by_importance_of_a_byte_level_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_dense(tmp_path / "dense", "llama", vocab_size=256)
    (tmp_path / "text").mkdir()
    for number, name in enumerate("abcd"):
        (tmp_path / "text" / f"{name}.txt").write_bytes(
            bytes(range(number * 60, number * 60 + 60)) * 5
        )
    command = ["convert", str(tmp_path / "dense"), str(tmp_path / "moe"), "--top-k", "2"]
    command += ["--num-experts", "4", "--split", "importance", "--sharing", "inner"]
    command += ["--data", str(tmp_path / "text"), "--sequence-length", "16"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "MixtralForCausalLM, 4 experts of 12 neurons, 2 per token, routed output x 2" in out
    assert "experts in the order of the domains: a, b, c, d" in out
    load_moe(tmp_path / "moe")
    # Every row of an expert is a row of the dense matrix, none twice in an expert.
    dense_rows = load_file(tmp_path / "dense/model.safetensors")[
        "model.layers.0.mlp.up_proj.weight"
    ]
    rows = {tuple(row) for row in dense_rows.tolist()}
    tensors = load_file(tmp_path / "moe/model.safetensors")
    for expert in range(4):
        part = tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"]
        assert len({tuple(row) for row in part.tolist()} & rows) == 12


def test_command_says_what_is_wrong(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*flags: str) -> str:
        command = ["convert", str(dense), str(tmp_path / "moe"), "--num-experts", "4"]
        assert main([*command, "--top-k", "2", *flags]) == EXIT_USAGE
        return capsys.readouterr().err

    assert "needs --data" in error("--split", "importance")
    text = tmp_path / "text"
    text.mkdir()
    for name in "ab":
        (text / f"{name}.txt").write_text("some text " * 40)
    assert "used by --split importance only" in error("--data", str(text))
    importance = ("--split", "importance", "--data", str(text))
    assert "got 2 domains (a, b), expected 4, one per expert" in error(*importance)
    for name in "cd":
        (text / f"{name}.txt").write_text("more text " * 40)
    assert "--sequence-length: got 1" in error(*importance, "--sequence-length", "1")
    assert f"vocabulary of {VOCABULARY}" in error(*importance)
    shutil.rmtree(dense)
    assert "no config.json" in error()
    assert sorted(os.listdir(tmp_path)) == ["text"]


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["convert", "a", "b", "--num-experts", "4", "--top-k", "2"]) == EXIT_USAGE
    assert "safetensors is missing: pip install 'ds_moe_lb[hf]'" in capsys.readouterr().err


def test_text_is_read_with_the_tokenizer_of_the_checkpoint(tmp_path: Path) -> None:
    """A word-level tokenizer: token ids by hand, and pieces too short are left out."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from ds_moe_lb.convert.domain_text import domain_batches, text_tokenizer
    from ds_moe_lb.data.corpus import Domain

    words = Tokenizer(models.WordLevel({"?": 0, "to": 1, "be": 2, "or": 3, "not": 4}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    tokenize, bytes_per_token = text_tokenizer(tmp_path, vocab_size=5)
    text = np.frombuffer(b"to be or not to be", dtype=np.uint8)
    domain = Domain(name="d", train=text, validation=text, num_documents=(1, 1))

    def batches(length: int) -> list[list[list[int]]]:
        cut = domain_batches(
            domain,
            tokenize,
            bytes_per_token=bytes_per_token,
            num_sequences=3,
            sequence_length=length,
        )
        return [tokens.tolist() for tokens in cut]

    assert batches(6) == [[[1, 2, 3, 4, 1, 2]]]
    with pytest.raises(ValueError, match=r"18 training bytes hold no piece of 7 tokens"):
        batches(7)


def _dense_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).double().eval()

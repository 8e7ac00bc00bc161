"""The corpus: what is read, what is held out, what is hashed, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_moe_lb.data import builtin
from ds_moe_lb.data.batches import (
    BatchPlan,
    check_sequence_length,
    training_micro_batches,
    validation_batches,
)
from ds_moe_lb.data.builtin import builtin_corpus
from ds_moe_lb.data.corpus import Corpus, Document, build_corpus, build_domain
from ds_moe_lb.data.folder import folder_corpus
from ds_moe_lb.data.readers import read_catalogue, read_english


def _two_domains() -> Corpus:
    """Domain a holds bytes below 100, domain b bytes from 100 on."""
    random = np.random.default_rng(0)
    return build_corpus(
        [
            build_domain(
                name,
                [
                    Document(
                        name=str(i), text=random.integers(low, low + 90, 500, np.uint8).tobytes()
                    )
                    for i in range(10)
                ],
            )
            for name, low in (("b", 100), ("a", 10))
        ]
    )


def _plan(**changes: int) -> BatchPlan:
    sizes = {"sequence_length": 16, "micro_batch_size": 2, "gradient_accumulation_steps": 4}
    return BatchPlan(**{**sizes, "dp_world_size": 2, "seed": 3, **changes})


def test_builtin_corpus_has_six_domains_and_held_out_files() -> None:
    corpus = builtin_corpus()
    assert len(corpus.domains) >= 6
    assert {"python", "cpp", "english", "tables", "charmaps"} <= set(corpus.domain_names)
    for domain in corpus.domains:
        assert domain.num_documents[0] >= 1 and domain.num_documents[1] >= 1
        assert len(domain.validation) >= 0.1 * (len(domain.train) + len(domain.validation))
    assert builtin_corpus().sha256 == corpus.sha256


def test_our_own_readme_is_no_part_of_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every edit of the README once changed the text, and with it all digits of the demo."""
    for name in ("ds_moe_lb-0.1.0", "numpy-2.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"The words of {name}.")
    monkeypatch.setattr(builtin, "_roots", lambda: {"packages": [tmp_path]})
    source = builtin.Source(name="english", patterns=("packages:*.dist-info/METADATA",))
    (document,) = builtin._documents(source)
    assert document.name == "numpy-2.0.dist-info/METADATA"


def test_too_few_domains_names_what_was_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = builtin.Source(name="nothing", patterns=("stdlib:no_such_folder/*.xyz",))
    monkeypatch.setattr(builtin, "SOURCES", (nowhere,))
    with pytest.raises(
        ValueError, match=r"found 0 domains.*(?s:.*)nothing: 0 bytes.*no_such_folder"
    ):
        builtin_corpus()


def test_a_document_is_never_split_between_training_and_validation() -> None:
    documents = [Document(name=str(i), text=bytes([i]) * 50) for i in range(40)]
    domain = build_domain("d", documents)
    newline = {10}
    train, held_out = set(domain.train.tolist()), set(domain.validation.tolist())
    assert (train & held_out) <= newline
    assert train | held_out >= set(range(40))
    assert domain.num_documents == (36, 4)


def test_hash_changes_with_content_and_name() -> None:
    def corpus(name: str, text: bytes) -> str:
        documents = [Document(name="1", text=text), Document(name="2", text=b"other")]
        return build_corpus([build_domain(name, documents)]).sha256

    assert len({corpus("a", b"x"), corpus("a", b"y"), corpus("b", b"x")}) == 3


def test_global_batch_does_not_depend_on_how_it_is_cut() -> None:
    """The same 16 sequences in the same order for 1 x 16, 2 x 8 and 2 ranks x 4 x 2."""
    corpus = _two_domains()

    def sequences(plan: BatchPlan) -> torch.Tensor:
        per_rank = [
            list(training_micro_batches(corpus, plan, step=5, dp_rank=rank))
            for rank in range(plan.dp_world_size)
        ]
        return torch.cat(
            [batch for micro_step in zip(*per_rank, strict=True) for batch in micro_step]
        )

    cuts = [(1, 16, 1), (2, 8, 1), (2, 4, 2), (4, 2, 2)]
    batches = [
        sequences(
            _plan(micro_batch_size=size, gradient_accumulation_steps=steps, dp_world_size=ranks)
        )
        for size, steps, ranks in cuts
    ]
    assert all(torch.equal(batch, batches[0]) for batch in batches[1:])
    assert batches[0].shape == (16, 17)


def test_each_sequence_comes_from_one_domain_and_steps_differ() -> None:
    corpus = _two_domains()
    first, second = (
        torch.cat(list(training_micro_batches(corpus, _plan(), step=step, dp_rank=0)))
        for step in (0, 1)
    )
    assert not torch.equal(first, second)
    text = first[(first != 10).all(dim=1)]  # 10 joins documents
    assert bool(((text < 100).all(dim=1) | (text >= 100).all(dim=1)).all())


def test_validation_batches_are_full_and_repeatable() -> None:
    domain = _two_domains().domains[0]

    def batches() -> list[torch.Tensor]:
        return list(validation_batches(domain, sequence_length=16, batch_size=4, max_batches=3))

    assert [batch.shape for batch in batches()] == [(4, 17)] * 3
    assert torch.equal(torch.cat(batches()), torch.cat(batches()))


def test_a_domain_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"domain 'a': 500 held-out bytes, expected at least 1025"):
        check_sequence_length(_two_domains(), 1024)


def test_folder_with_each_kind_of_entry(tmp_path: Path) -> None:
    (tmp_path / "code" / "deep").mkdir(parents=True)
    for index in range(5):
        (tmp_path / "code" / "deep" / f"{index}.py").write_text(f"x = {index}\n" * 30)
    (tmp_path / "prose.txt").write_text("a line of prose\n" * 100)
    lines = [json.dumps({"text": f"record {index} " * 5}) for index in range(20)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / ".hidden").write_text("not a domain")
    corpus = folder_corpus(tmp_path)
    assert corpus.domain_names == ["chat", "code", "prose"]
    chat, code, prose = corpus.domains
    assert sum(chat.num_documents) == 20 and sum(code.num_documents) == 5
    assert prose.num_documents == (1, 1)
    assert 0.08 <= len(prose.validation) / 1600 <= 0.12
    assert bytes(prose.validation).startswith(b"a line of prose\n")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "the folder is empty"),
        ({"a.pdf": "x"}, r"found the file .*a\.pdf; expected one entry per domain"),
        ({"a.txt": ""}, r"domain 'a': got 0 document\(s\) with text, expected at least 2"),
        ({"a.jsonl": "{bad"}, r"a\.jsonl, line 1: not JSON"),
        ({"a.jsonl": '{"body": "x"}'}, r"line 1: found \['body'\], expected an object"),
        ({"a.txt": "x" * 99, "a.jsonl": '{"text": "x"}\n' * 2}, "two entries for the domain 'a'"),
        ({"a/only.txt": "x"}, r"domain 'a': got 1 document\(s\)"),
    ],
)
def test_folder_errors_say_what_was_found(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        folder_corpus(tmp_path)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data .*nowhere: found nothing there"):
        folder_corpus(tmp_path / "nowhere")


def test_catalogue_gives_translations_without_header(tmp_path: Path) -> None:
    """A hand-made .mo file: header, one message, one plural message."""
    pairs = [(b"", b"Language: de\n"), (b"cat", b"Katze"), (b"dog\0dogs", b"Hund\0Hunde")]
    body, table, offset = b"", [], 28 + 16 * len(pairs)
    for index in (0, 1):
        for pair in pairs:
            table += [len(pair[index]), offset + len(body)]
            body += pair[index] + b"\0"
    header = [0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0]
    path = tmp_path / "messages.mo"
    path.write_bytes(np.array(header + table, "<u4").tobytes() + body)
    assert read_catalogue(path) == b"Katze\nHund\nHunde"
    path.write_bytes(b"not a catalogue, but long enough")
    assert read_catalogue(path) == b""


def test_english_is_docstrings_and_descriptions(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""A module."""\ndef f():\n    """It does so."""\n    return 1\n'
    )
    (tmp_path / "METADATA").write_text("Name: x\nVersion: 1\n\nThe read me.\n")
    assert read_english(tmp_path / "a.py") == b"A module.\n\nIt does so."
    assert read_english(tmp_path / "METADATA") == b"The read me.\n"

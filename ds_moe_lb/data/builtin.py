"""The built-in corpus: text that Python and the packages we depend on ship. Nothing is downloaded.

Each source names where it looks. A source that finds too little on this machine is left out; fewer
than six domains is an error that says what was searched.
"""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_moe_lb.data.corpus import Corpus, Document, Domain, build_corpus, build_domain
from ds_moe_lb.data.readers import read_catalogue, read_english, read_plain

MIN_DOMAINS = 6
MAX_DOMAIN_BYTES = 1_500_000
MIN_DOMAIN_BYTES = 60_000


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the text of one domain is.

    Attributes:
        name: name of the domain.
        patterns: globs below the standard library (``stdlib:``) or below the folder that installed
            packages are in (``packages:``).
        read: turns a file into its text.
    """

    name: str
    patterns: tuple[str, ...]
    read: Callable[[Path], bytes] = read_plain


SOURCES = (
    Source(
        name="python",
        patterns=(
            "stdlib:*.py",
            "stdlib:asyncio/*.py",
            "stdlib:email/*.py",
            "stdlib:unittest/*.py",
            "stdlib:multiprocessing/*.py",
            "stdlib:importlib/*.py",
            "stdlib:http/*.py",
        ),
    ),
    Source(
        name="cpp",
        patterns=(
            "packages:torch/include/c10/**/*.h",
            "packages:torch/include/torch/csrc/**/*.h",
            "packages:torch/include/ATen/core/**/*.h",
            "packages:torch/include/ATen/native/**/*.h",
        ),
    ),
    Source(
        name="english",
        patterns=(
            "packages:torch/nn/**/*.py",
            "packages:torch/optim/**/*.py",
            "packages:torch/distributions/*.py",
            "packages:torch/distributed/*.py",
            "packages:numpy/lib/*.py",
            "packages:numpy/polynomial/*.py",
            "packages:numpy/ma/*.py",
            "packages:*.dist-info/METADATA",
        ),
        read=read_english,
    ),
    Source(
        name="web",
        patterns=tuple(
            f"packages:{package}/**/*.{suffix}"
            for package in (
                "matplotlib",
                "tensorboard",
                "torch/utils",
                "numpy",
                "werkzeug",
                "tokenizers",
            )
            for suffix in ("html", "svg", "css", "js", "xml")
        )
        + ("stdlib:idlelib/*.html", "stdlib:pydoc_data/*.css"),
    ),
    Source(
        name="tables",
        patterns=(
            "packages:numpy/**/*.csv",
            "packages:matplotlib/**/*.csv",
            "packages:matplotlib/**/*.afm",
            "packages:tzdata/**/*.tab",
            "packages:deepspeed/**/*.json",
        ),
    ),
    Source(name="charmaps", patterns=("stdlib:encodings/*.py",)),
    Source(
        name="cmake",
        patterns=("packages:torch/share/cmake/**/*.cmake", "packages:numpy/**/*.cmake"),
    ),
    Source(name="languages", patterns=("packages:*/**/LC_MESSAGES/*.mo",), read=read_catalogue),
)


def builtin_corpus() -> Corpus:
    """Read the corpus from this machine's Python and packages.

    Raises:
        ValueError: fewer than six domains were found; names every place that was searched.
    """
    found: list[Domain] = []
    missing: list[str] = []
    for source in SOURCES:
        documents = list(_documents(source))
        size = sum(len(document.text) for document in documents)
        if size >= MIN_DOMAIN_BYTES and len(documents) >= 2:
            found.append(build_domain(source.name, documents))
        else:
            searched = ", ".join(source.patterns)
            missing.append(f"  {source.name}: {size} bytes in {len(documents)} files ({searched})")
    if len(found) < MIN_DOMAINS:
        roots = "; ".join(f"{key}: {list(map(str, value))}" for key, value in _roots().items())
        raise ValueError(
            f"built-in corpus: found {len(found)} domains, expected at least {MIN_DOMAINS} with "
            f"{MIN_DOMAIN_BYTES} bytes each. Too little text for:\n" + "\n".join(missing) + f"\n"
            f"Searched below {roots}. Give your own text with --data DIR."
        )
    return build_corpus(found)


def _documents(source: Source) -> Iterator[Document]:
    """Distinct texts in an order that does not depend on the machine, up to the domain's size."""
    paths: dict[str, Path] = {}
    for pattern in source.patterns:
        root_name, _, glob = pattern.partition(":")
        for root in _roots()[root_name]:
            for path in root.glob(glob):
                name = path.relative_to(root).as_posix()
                # Our own metadata has the README in it, with which the text would change.
                if path.is_file() and not name.startswith("ds_moe_lb"):
                    paths.setdefault(name, path)
    seen: set[bytes] = set()
    size = 0
    for name in sorted(paths, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        text = source.read(paths[name])
        digest = hashlib.sha256(text).digest()
        if not text or digest in seen:  # licences and generated headers come in many copies
            continue
        seen.add(digest)
        yield Document(name=name, text=text)
        size += len(text)
        if size >= MAX_DOMAIN_BYTES:
            return


def _roots() -> dict[str, list[Path]]:
    """The standard library, and each folder that packages are in (torch may be in another one)."""
    packages = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    for name in ("torch", "numpy", "deepspeed"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            packages.append(Path(spec.origin).parent.parent)
    return {
        "stdlib": [Path(sysconfig.get_path("stdlib"))],
        "packages": list(dict.fromkeys(packages)),
    }

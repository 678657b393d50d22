"""
The metadata of installed packages, read once in a process: accelerate asks for that of a dozen packages for each
trainer, and a run of `opo-trl train` for that of all. No test changes a package of its own process.
"""

from importlib.metadata import Distribution, PackageMetadata
from pathlib import Path


read = Distribution.metadata.fget
by_folder: dict[Path, PackageMetadata] = {}


def metadata(package: Distribution) -> PackageMetadata:
    if package._path not in by_folder:
        by_folder[package._path] = read(package)
    return by_folder[package._path]


Distribution.metadata = property(metadata)

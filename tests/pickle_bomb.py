"""A pickle that acts when it is loaded, for tests of what is never loaded as one."""

import os
from pathlib import Path


class Bomb:
    """Loading its pickle creates a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)

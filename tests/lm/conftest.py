"""Files of LMs that tests write as text."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="lm.arpa"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file

"""What the plug-ins for other libraries' trainers share."""

from importlib.metadata import version

import pytest

from threepo.errors import UserError
from threepo.plugins.trainers import check_release


def test_another_release_is_refused() -> None:
    installed = version("pytest")
    for release in (installed, installed.split(".")[0]):
        check_release("pytest", release)
    for release in ("0.1", f"{installed}1"):  # 1.16 is no 1.161
        with pytest.raises(UserError, match=f"^pytest {installed} is installed: .* pip install 'pytest=={release}"):
            check_release("pytest", release)

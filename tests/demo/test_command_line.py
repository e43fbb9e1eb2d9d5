"""What the commands import, and what they do with arguments that they do not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from swap_adam.__main__ import main


@pytest.mark.parametrize("command", ["demo", "plan", "check"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"python -m swap_adam {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["plan", "--no-such-option"]])
def test_unknown_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_plan_loads_no_framework_and_the_library_no_demo() -> None:
    program = (
        "import sys, swap_adam.__main__ as command\n"
        "assert command.main(['plan', '--params', '1e6']) == 0\n"
        "assert not {'torch', 'mindspore', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "import swap_adam.torch\n"
        "loaded = [name for name in sys.modules if name.startswith('swap_adam.demo')]\n"
        "assert not loaded and 'rich' not in sys.modules, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

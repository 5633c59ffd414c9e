"""The `encore` command: `encore env | estimate | plan | compare | tune`. `commands.py` has the commands, `targets.py`
loads the model that a user names, `command_line.py` has what every command has in common. No decisions, no
measurements."""

from encore.cli.commands import main as main

"""The `quire-scheduler` command."""

from svc_common.command import run_command


def main() -> None:
    """Run the service. If its packages are missing, the error names the extra to install."""
    run_command("scheduler", "scheduler_svc.service")

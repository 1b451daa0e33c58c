"""What every service needs to run: serving and draining, settings, errors, logs, metrics. Nothing of the domain."""

"""What every service needs to run: serve and drain, config, errors, logs. Nothing of the domain."""

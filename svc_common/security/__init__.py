"""Who may call: TLS files, roles of services by certificate or token, and the check of the own certificate."""

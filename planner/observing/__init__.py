"""One observation from the reports of routers and workers and from discovery."""

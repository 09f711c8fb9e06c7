"""HTTP as a transport: connections, bodies, answers, errors; nothing of what is asked."""

"""Ray: starting or joining a cluster, and the machines of the cluster."""

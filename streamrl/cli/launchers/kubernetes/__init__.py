"""`--k8s`: a run on Kubernetes, by manifests made from its plan."""

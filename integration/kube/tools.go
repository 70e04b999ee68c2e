//go:build tools

// The Kubernetes programs that the cluster tests run, as dependencies: go.mod and go.sum pin them.
package kube

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubelet"
)

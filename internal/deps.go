//go:build deps

// Package internal keeps modules that the first slices need in go.mod until
// the packages that import them land. Delete it with the last of them.
package internal

import (
	_ "connectrpc.com/connect"
	_ "github.com/cilium/ebpf"
	_ "github.com/erofs/go-erofs"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/google/go-containerregistry/pkg/v1"
	_ "github.com/klauspost/compress/zstd"
	_ "github.com/landlock-lsm/go-landlock/landlock"
	_ "github.com/moby/profiles/seccomp"
	_ "github.com/pelletier/go-toml/v2"
	_ "github.com/prometheus/client_golang/prometheus"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/vishvananda/netlink"
	_ "go.etcd.io/etcd/client/v3"
	_ "go.etcd.io/etcd/server/v3/embed"
	_ "go.uber.org/goleak"
	_ "golang.org/x/net/http2"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "google.golang.org/protobuf/proto"
	_ "pgregory.net/rapid"
)

// Package store keeps the little that a unit must share: API keys, names of
// layers, and which edges there are. Its engine is etcd, either a cluster that
// runs apart or one embedded in this process; nothing else talks to etcd.
//
// The words: a document is a JSON value under a key; a cache is a copy of all
// documents below a prefix, kept current by a watch, so that no API call waits
// for a read of etcd.
package store

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/opendsec/dsec"
)

// root is the prefix of every key, with the version of the documents' layout.
const root = "/dsec/v1/"

// startTimeout bounds the start of an embedded etcd, and the first contact
// with a separate one.
const startTimeout = 30 * time.Second

// Config says which etcd to use.
type Config struct {
	// Dir is the data directory of an embedded etcd, made if missing. It is
	// used where Endpoints is empty.
	Dir string
	// Endpoints are the client URLs of a separate etcd.
	Endpoints []string
	Log       *slog.Logger
}

// Store is an open store.
type Store struct {
	client *clientv3.Client
	etcd   *embed.Etcd // nil where etcd runs apart
	log    *slog.Logger
}

// Open starts or reaches the etcd that cfg names. The error is for the operator.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	s := &Store{log: cfg.Log.With("component", "store")}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var err error
	if len(cfg.Endpoints) > 0 {
		err = s.dial(ctx, cfg.Endpoints)
	} else {
		err = s.embed(ctx, cfg.Dir)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Store) dial(ctx context.Context, endpoints []string) error {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		Logger:               zap.NewNop(),
	})
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	if _, err := client.Get(ctx, root, clientv3.WithCountOnly()); err != nil {
		_ = client.Close()
		return fmt.Errorf("etcd %v does not answer: %w", endpoints, err)
	}
	s.client = client
	return nil
}

// embed starts a single etcd that listens nowhere: the client calls it in
// process. Its ticks are short because no peer is waited for.
func (s *Store) embed(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = "dsec", dir
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.ListenPeerUrls, cfg.ListenClientUrls = []url.URL{}, []url.URL{}
	cfg.EnableGRPCGateway = false
	cfg.TickMs, cfg.ElectionMs = 10, 100
	cfg.AutoCompactionMode, cfg.AutoCompactionRetention = "revision", "10000"
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(lastWords(s.log))
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("etcd in %s: %w", dir, err)
	}
	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		etcd.Close()
		return fmt.Errorf("etcd in %s: %w", dir, err)
	case <-ctx.Done():
		etcd.Close()
		return fmt.Errorf("etcd in %s: not ready: %w", dir, ctx.Err())
	}
	s.etcd, s.client = etcd, v3client.New(etcd.Server)
	return nil
}

// lastWords is a logger for etcd, which ends the process where it cannot go on,
// as for want of disk or descriptors: the log then tells why. All else that it
// says is not for this process's log.
func lastWords(log *slog.Logger) *zap.Logger {
	lines := zapcore.AddSync(slog.NewLogLogger(log.Handler(), slog.LevelError).Writer())
	encoder := zapcore.NewConsoleEncoder(zapcore.EncoderConfig{MessageKey: "msg"})
	return zap.New(zapcore.NewCore(encoder, lines, zapcore.DPanicLevel))
}

// Close ends the client and an embedded etcd. Close the caches first.
func (s *Store) Close() error {
	err := s.client.Close()
	if errors.Is(err, context.Canceled) { // what the client answers when all went well
		err = nil
	}
	if s.etcd != nil {
		s.etcd.Close()
	}
	return err
}

// List reads all documents below prefix, by the rest of their key.
func List[T any](ctx context.Context, s *Store, prefix string) (map[string]T, error) {
	docs, _, err := list[T](ctx, s, prefix)
	return docs, err
}

func list[T any](ctx context.Context, s *Store, prefix string) (map[string]T, int64, error) {
	res, err := s.client.Get(ctx, root+prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, 0, unreachable(err)
	}
	docs := make(map[string]T, len(res.Kvs))
	for _, kv := range res.Kvs {
		var v T
		name := string(kv.Key[len(root)+len(prefix):])
		if err := json.Unmarshal(kv.Value, &v); err != nil {
			s.log.Error("damaged document left out", "key", string(kv.Key), "err", err)
			continue
		}
		docs[name] = v
	}
	return docs, res.Header.Revision, nil
}

// Get reads the document under key, with the store's revision by which it is so.
func Get[T any](ctx context.Context, s *Store, key string) (v T, rev int64, ok bool, err error) {
	res, err := s.client.Get(ctx, root+key)
	if err != nil {
		return v, 0, false, unreachable(err)
	}
	if len(res.Kvs) == 0 {
		return v, res.Header.Revision, false, nil
	}
	if err := json.Unmarshal(res.Kvs[0].Value, &v); err != nil {
		return v, 0, false, dsec.Errorf(dsec.CodeInternal, "the document %s in the store is damaged", key)
	}
	return v, res.Header.Revision, true, nil
}

// Put writes a document and returns its revision, which a Cache can wait for.
func Put[T any](ctx context.Context, s *Store, key string, v T) (int64, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return 0, err
	}
	res, err := s.client.Put(ctx, root+key, string(data))
	if err != nil {
		return 0, unknown(err)
	}
	return res.Header.Revision, nil
}

// Create writes a document that must not be there yet; it is a conflict if it is.
func Create[T any](ctx context.Context, s *Store, key string, v T) (int64, error) {
	return PutIf(ctx, s, key, v, Absent(key))
}

// Cond is a condition of a write.
type Cond clientv3.Cmp

// Absent holds where there is no document under key.
func Absent(key string) Cond {
	return Cond(clientv3.Compare(clientv3.CreateRevision(root+key), "=", 0))
}

// NoneBelow holds where there is no document whose key begins with prefix.
func NoneBelow(prefix string) Cond {
	return Cond(clientv3.Compare(clientv3.CreateRevision(root+prefix), "=", 0).WithPrefix())
}

// UnchangedSince holds where the document under key was not written after rev.
func UnchangedSince(key string, rev int64) Cond {
	return Cond(clientv3.Compare(clientv3.ModRevision(root+key), "<", rev+1))
}

// PutIf writes a document where all conditions hold, in one transaction; it is
// a conflict if not.
func PutIf[T any](ctx context.Context, s *Store, key string, v T, conds ...Cond) (int64, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return 0, err
	}
	return s.writeIf(ctx, clientv3.OpPut(root+key, string(data)), conds)
}

// DeleteIf removes the document under key, if there is one, where all conditions hold;
// it is a conflict if not.
func (s *Store) DeleteIf(ctx context.Context, key string, conds ...Cond) (int64, error) {
	return s.writeIf(ctx, clientv3.OpDelete(root+key), conds)
}

func (s *Store) writeIf(ctx context.Context, write clientv3.Op, conds []Cond) (int64, error) {
	cmps := make([]clientv3.Cmp, len(conds))
	for i, c := range conds {
		cmps[i] = clientv3.Cmp(c)
	}
	res, err := s.client.Txn(ctx).If(cmps...).Then(write).Commit()
	if err != nil {
		return 0, unknown(err)
	}
	if !res.Succeeded {
		return 0, dsec.Errorf(dsec.CodeConflict, "it was changed meanwhile, or is there already")
	}
	return res.Header.Revision, nil
}

// PutFor writes a document that goes away by itself after ttl. One that is there keeps its lease, where
// that is as long: a lease that is left behind would stay for all of its time.
func PutFor[T any](ctx context.Context, s *Store, key string, v T, ttl time.Duration) (int64, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return 0, err
	}
	lease, old, err := s.lease(ctx, key, int64(ttl/time.Second))
	if err != nil {
		return 0, unreachable(err)
	}
	res, err := s.client.Put(ctx, root+key, string(data), clientv3.WithLease(lease))
	if err != nil {
		return 0, unknown(err)
	}
	if old != clientv3.NoLease {
		_, _ = s.client.Revoke(ctx, old) // which is of no document any more; where this fails it is over by itself
	}
	return res.Header.Revision, nil
}

// lease begins the lease of a document anew, or makes one: old is the one that it had then.
func (s *Store) lease(ctx context.Context, key string, seconds int64) (lease, old clientv3.LeaseID, err error) {
	there, err := s.client.Get(ctx, root+key) // etcd 3.7 tells no lease where only keys are asked for
	if err != nil {
		return 0, 0, err
	}
	if len(there.Kvs) > 0 && there.Kvs[0].Lease != 0 {
		old = clientv3.LeaseID(there.Kvs[0].Lease)
		kept, err := s.client.KeepAliveOnce(ctx, old)
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound): // it is over
			old = clientv3.NoLease
		case err != nil:
			return 0, 0, err
		case kept.TTL == seconds:
			return old, clientv3.NoLease, nil
		}
	}
	made, err := s.client.Grant(ctx, seconds)
	if err != nil {
		return 0, 0, err
	}
	return made.ID, old, nil
}

// Delete removes the document under key, if there is one.
func (s *Store) Delete(ctx context.Context, key string) (rev int64, err error) {
	res, err := s.client.Delete(ctx, root+key)
	if err != nil {
		return 0, unknown(err)
	}
	return res.Header.Revision, nil
}

// unitKey is the document that holds the unit's ID.
const unitKey = "unit"

// Unit is the ID of the unit that this store is of. It is made once.
func (s *Store) Unit(ctx context.Context) (string, error) {
	_, err := Create(ctx, s, unitKey, strings.ToLower(rand.Text()))
	if err != nil && dsec.CodeOf(err) != dsec.CodeConflict {
		return "", err
	}
	docs, err := List[string](ctx, s, unitKey)
	if err != nil {
		return "", err
	}
	if docs[""] == "" {
		return "", dsec.Errorf(dsec.CodeInternal, "the unit's ID in the store is damaged")
	}
	return docs[""], nil
}

// Revision is the store's present one.
func (s *Store) Revision(ctx context.Context) (int64, error) {
	res, err := s.client.Get(ctx, root, clientv3.WithCountOnly())
	if err != nil {
		return 0, unreachable(err)
	}
	return res.Header.Revision, nil
}

func unreachable(err error) error {
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the store does not answer", Err: err}
}

// unknown is for writes: one that failed may have been done.
func unknown(err error) error {
	return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the store did not answer; the change may have been made", Err: err}
}

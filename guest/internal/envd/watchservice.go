package envd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	fspb "agentenv/guest/gen/filesystem"
)

// watcherTable holds the watchers that clients poll.
type watcherTable struct {
	mu   sync.Mutex
	byID map[string]*watch
}

func newWatcherTable() *watcherTable { return &watcherTable{byID: map[string]*watch{}} }

// On these the kernel does not tell about changes made elsewhere.
var networkFilesystems = map[int64]string{
	unix.NFS_SUPER_MAGIC: "NFS", unix.SMB_SUPER_MAGIC: "SMB", unix.SMB2_SUPER_MAGIC: "SMB",
	unix.CIFS_SUPER_MAGIC: "CIFS", unix.FUSE_SUPER_MAGIC: "FUSE",
}

type watchRequest interface {
	GetPath() string
	GetRecursive() bool
	GetIncludeEntry() bool
	GetAllowNetworkMounts() bool
}

func (fs *filesystemService) openWatch(ctx context.Context, req watchRequest) (*watch, error) {
	path, _, err := fs.path(ctx, req.GetPath())
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, fsError(err, path)
	}
	if !st.IsDir() {
		return nil, invalid("path is not a directory: %s", path)
	}
	if !req.GetAllowNetworkMounts() {
		var sfs unix.Statfs_t
		if unix.Statfs(path, &sfs) == nil {
			if kind, ok := networkFilesystems[int64(uint32(sfs.Type))]; ok {
				return nil, invalid("cannot watch a path on a network filesystem (%s): %s", kind, path)
			}
		}
	}
	w, err := newWatch(fs.s, path, req.GetRecursive(), req.GetIncludeEntry())
	if err != nil {
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENOSPC) {
			return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("too many watches: %w", err))
		}
		return nil, fsError(err, path)
	}
	return w, nil
}

func (fs *filesystemService) WatchDir(ctx context.Context, req *fspb.WatchDirRequest, stream *connect.ServerStream[fspb.WatchDirResponse]) error {
	w, err := fs.openWatch(ctx, req)
	if err != nil {
		return err
	}
	defer w.close()
	start := &fspb.WatchDirResponse{Event: &fspb.WatchDirResponse_Start{Start: &fspb.WatchDirResponse_StartEvent{}}}
	if err := stream.Send(start); err != nil {
		return err
	}
	interval := keepaliveOf(ctx)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		events, err := w.take()
		if err != nil {
			return connect.NewError(connect.CodeResourceExhausted, err)
		}
		for _, e := range events {
			if err := stream.Send(&fspb.WatchDirResponse{Event: &fspb.WatchDirResponse_Filesystem{Filesystem: e}}); err != nil {
				return err
			}
		}
		if len(events) > 0 {
			ticker.Reset(interval)
			continue
		}
		select {
		case <-w.ready:
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
			alive := &fspb.WatchDirResponse{Event: &fspb.WatchDirResponse_Keepalive{Keepalive: &fspb.WatchDirResponse_KeepAlive{}}}
			if err := stream.Send(alive); err != nil {
				return err
			}
		}
	}
}

func (fs *filesystemService) CreateWatcher(ctx context.Context, req *fspb.CreateWatcherRequest) (*fspb.CreateWatcherResponse, error) {
	w, err := fs.openWatch(ctx, req)
	if err != nil {
		return nil, err
	}
	var raw [12]byte
	_, _ = rand.Read(raw[:])
	id := "w" + hex.EncodeToString(raw[:])
	t := fs.s.watchers
	t.mu.Lock()
	t.byID[id] = w
	t.mu.Unlock()
	return &fspb.CreateWatcherResponse{WatcherId: id}, nil
}

func (t *watcherTable) find(id string, remove bool) (*watch, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.byID[id]
	if w == nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher with id %s not found", id))
	}
	if remove {
		delete(t.byID, id)
	}
	return w, nil
}

func (fs *filesystemService) GetWatcherEvents(_ context.Context, req *fspb.GetWatcherEventsRequest) (*fspb.GetWatcherEventsResponse, error) {
	w, err := fs.s.watchers.find(req.GetWatcherId(), false)
	if err != nil {
		return nil, err
	}
	events, err := w.take()
	if err != nil {
		return nil, connect.NewError(connect.CodeResourceExhausted, err)
	}
	return &fspb.GetWatcherEventsResponse{Events: events}, nil
}

func (fs *filesystemService) RemoveWatcher(_ context.Context, req *fspb.RemoveWatcherRequest) (*fspb.RemoveWatcherResponse, error) {
	w, err := fs.s.watchers.find(req.GetWatcherId(), true)
	if err != nil {
		return nil, err
	}
	w.close()
	return &fspb.RemoveWatcherResponse{}, nil
}

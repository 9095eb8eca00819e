package envd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"connectrpc.com/connect"

	fspb "agentenv/guest/gen/filesystem"
)

type filesystemService struct{ s *server }

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// path resolves what the client sent for the user of the call.
func (fs *filesystemService) path(ctx context.Context, raw string) (string, account, error) {
	u, workdir, err := rpcUser(ctx, fs.s)
	if err != nil {
		return "", u, err
	}
	path, err := resolvePath(raw, u.home, workdir)
	if err != nil {
		return "", u, invalid("%w", err)
	}
	return path, u, nil
}

func (fs *filesystemService) Stat(ctx context.Context, req *fspb.StatRequest) (*fspb.StatResponse, error) {
	path, _, err := fs.path(ctx, req.GetPath())
	if err != nil {
		return nil, err
	}
	entry, err := fs.s.describe(path)
	if err != nil {
		return nil, fsError(err, path)
	}
	return &fspb.StatResponse{Entry: entry}, nil
}

func (fs *filesystemService) MakeDir(ctx context.Context, req *fspb.MakeDirRequest) (*fspb.MakeDirResponse, error) {
	path, u, err := fs.path(ctx, req.GetPath())
	if err != nil {
		return nil, err
	}
	if st, err := os.Stat(path); err == nil {
		if st.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
		}
		return nil, invalid("path already exists but it is not a directory: %s", path)
	}
	if err := makeParents(path, u); err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			return nil, invalid("a parent is not a directory: %s", path)
		}
		return nil, fsError(err, path)
	}
	entry, err := fs.s.describe(path)
	if err != nil {
		return nil, fsError(err, path)
	}
	return &fspb.MakeDirResponse{Entry: entry}, nil
}

func (fs *filesystemService) Move(ctx context.Context, req *fspb.MoveRequest) (*fspb.MoveResponse, error) {
	source, u, err := fs.path(ctx, req.GetSource())
	if err != nil {
		return nil, err
	}
	destination, _, err := fs.path(ctx, req.GetDestination())
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(source); err != nil {
		return nil, fsError(err, source)
	}
	if err := makeParents(filepath.Dir(destination), u); err != nil {
		return nil, fsError(err, destination)
	}
	if err := os.Rename(source, destination); err != nil {
		return nil, fsError(err, source)
	}
	entry, err := fs.s.describe(destination)
	if err != nil {
		return nil, fsError(err, destination)
	}
	return &fspb.MoveResponse{Entry: entry}, nil
}

func (fs *filesystemService) Remove(ctx context.Context, req *fspb.RemoveRequest) (*fspb.RemoveResponse, error) {
	path, _, err := fs.path(ctx, req.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, invalid("the root directory cannot be removed")
	}
	if err := os.RemoveAll(path); err != nil && !errors.Is(err, syscall.ENOTDIR) {
		return nil, fsError(err, path)
	}
	return &fspb.RemoveResponse{}, nil
}

func (fs *filesystemService) ListDir(ctx context.Context, req *fspb.ListDirRequest) (*fspb.ListDirResponse, error) {
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
	out := &fspb.ListDirResponse{}
	if err := fs.list(ctx, path, max(req.GetDepth(), 1), out); err != nil {
		return nil, fsError(err, path)
	}
	return out, nil
}

// list adds what is below dir: a directory comes before its contents, names are sorted, links are not followed.
func (fs *filesystemService) list(ctx context.Context, dir string, depth uint32, out *fspb.ListDirResponse) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		path := filepath.Join(dir, e.Name())
		info, err := e.Info()
		if err != nil {
			continue // gone since the directory was read
		}
		out.Entries = append(out.Entries, fs.s.describeInfo(path, info))
		if e.IsDir() && depth > 1 {
			if err := fs.list(ctx, path, depth-1, out); err != nil && ctx.Err() != nil {
				return err
			}
		}
	}
	return nil
}

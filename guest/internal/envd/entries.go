package envd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	fspb "agentenv/guest/gen/filesystem"
)

const (
	metadataPrefix = "user.e2b."
	maxXattrList   = 64 << 10
)

// describe gives the entry at the path itself. A link has the type and mode of what it points to.
func (s *server) describe(path string) (*fspb.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	return s.describeInfo(path, info), nil
}

func (s *server) describeInfo(path string, info fs.FileInfo) *fspb.EntryInfo {
	e := &fspb.EntryInfo{
		Name: filepath.Base(path), Path: path, Size: info.Size(), Type: typeOf(info.Mode()),
		Mode: uint32(info.Mode().Perm()), Permissions: info.Mode().String(),
		ModifiedTime: timestamppb.New(info.ModTime()),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = s.accounts.userName(st.Uid), s.accounts.groupName(st.Gid)
	}
	if info.Mode()&fs.ModeSymlink == 0 {
		e.Metadata = readMetadata(path)
		return e
	}
	e.IsSymlink = true
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		if target, err = os.Readlink(path); err != nil {
			return e
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
	}
	e.SymlinkTarget = proto.String(target)
	if there, err := os.Stat(path); err == nil {
		e.Type, e.Mode = typeOf(there.Mode()), uint32(there.Mode().Perm())
	}
	return e
}

func typeOf(mode fs.FileMode) fspb.FileType {
	switch {
	case mode.IsRegular():
		return fspb.FileType_FILE_TYPE_FILE
	case mode.IsDir():
		return fspb.FileType_FILE_TYPE_DIRECTORY
	case mode&fs.ModeSymlink != 0:
		return fspb.FileType_FILE_TYPE_SYMLINK
	}
	return fspb.FileType_FILE_TYPE_UNSPECIFIED
}

// readMetadata gives what clients attached to the file; other user attributes are not theirs.
func readMetadata(path string) map[string]string {
	var small [256]byte
	list := small[:]
	n, err := unix.Llistxattr(path, list)
	if err == unix.ERANGE {
		list = make([]byte, maxXattrList)
		n, err = unix.Llistxattr(path, list)
	}
	if err != nil || n == 0 {
		return nil
	}
	var out map[string]string
	for name := range strings.SplitSeq(strings.TrimRight(string(list[:n]), "\x00"), "\x00") {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if !ok {
			continue
		}
		value := make([]byte, maxXattrList)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[key] = string(value[:n])
	}
	return out
}

// writeMetadata makes the client's attributes of the open file exactly these.
func writeMetadata(f *os.File, metadata map[string]string) error {
	fd := int(f.Fd())
	for key := range readMetadata(f.Name()) {
		if _, keep := metadata[key]; !keep {
			if err := unix.Fremovexattr(fd, metadataPrefix+key); err != nil && err != unix.ENODATA {
				return os.NewSyscallError("fremovexattr", err)
			}
		}
	}
	for key, value := range metadata {
		if err := unix.Fsetxattr(fd, metadataPrefix+key, []byte(value), 0); err != nil {
			return os.NewSyscallError("fsetxattr", err)
		}
	}
	return nil
}

// makeParents makes the missing directories up to and including dir, owned by the user.
func makeParents(dir string, u account) error {
	if st, err := os.Stat(dir); err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		}
		return nil
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := makeParents(parent, u); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return makeParentsAgain(dir, err)
		}
		return err
	}
	if int(u.uid) == os.Geteuid() && int(u.gid) == os.Getegid() {
		return nil
	}
	return os.Lchown(dir, int(u.uid), int(u.gid))
}

// makeParentsAgain: somebody made it in the meantime, or a broken link is in the way.
func makeParentsAgain(dir string, cause error) error {
	if st, err := os.Stat(dir); err == nil && st.IsDir() {
		return nil
	}
	return cause
}

// fsError translates an error of the operating system; `what` names the path for people.
func fsError(err error, what string) *connect.Error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("file not found: %s", what))
	case errors.Is(err, fs.ErrPermission):
		return connect.NewError(connect.CodePermissionDenied, err)
	case errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		return connect.NewError(connect.CodeInvalidArgument, err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("not enough disk space: %w", err))
	}
	return connect.NewError(connect.CodeInternal, err)
}

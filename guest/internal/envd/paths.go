package envd

import (
	"errors"
	"path/filepath"
	"strings"
)

// resolvePath turns what a client sent into an absolute path. Empty is the default working directory, else the home;
// `~` is the home; anything relative starts at the home and not at the working directory.
func resolvePath(path, home, workdir string) (string, error) {
	if strings.IndexByte(path, 0) >= 0 {
		return "", errors.New("path contains a NUL byte")
	}
	switch {
	case path == "":
		if workdir != "" {
			return resolvePath(workdir, home, "")
		}
		return filepath.Clean(home), nil
	case path == "~":
		return filepath.Clean(home), nil
	case strings.HasPrefix(path, "~/"):
		return filepath.Join(home, path[2:]), nil
	case path[0] == '~':
		return "", errors.New("path of another user's home is not supported: '" + path + "'")
	case path[0] == '/':
		return filepath.Clean(path), nil
	}
	return filepath.Join(home, path), nil
}

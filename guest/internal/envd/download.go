package envd

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const copyBuffer = 256 << 10

// fileTarget finds the account and path of a request on /files and checks that it may; it answers itself otherwise.
func (s *server) fileTarget(w http.ResponseWriter, r *http.Request, operation string) (u account, workdir string, ok bool) {
	query := r.URL.Query()
	if err := authorizeFile(s.state.accessToken(), r.Header, query, operation, time.Now()); err != nil {
		fail(w, http.StatusUnauthorized, err.Error())
		return u, "", false
	}
	u, workdir, err := s.userFor(query.Get("username"))
	if err != nil {
		fail(w, http.StatusUnauthorized, err.Error())
		return u, "", false
	}
	return u, workdir, true
}

func (s *server) getFiles(w http.ResponseWriter, r *http.Request) {
	u, workdir, ok := s.fileTarget(w, r, "read")
	if !ok {
		return
	}
	asked := r.URL.Query().Get("path")
	path, err := resolvePath(asked, u.home, workdir)
	if err != nil {
		fail(w, http.StatusBadRequest, err.Error())
		return
	}
	// A pipe without a writer must not hold the request.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		failFile(w, err, path)
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		failFile(w, err, path)
		return
	}
	if info.IsDir() {
		fail(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", path))
		return
	}
	if !info.Mode().IsRegular() {
		fail(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is not a regular file", path))
		return
	}
	encoding, ok := negotiate(r.Header)
	if !ok {
		fail(w, http.StatusNotAcceptable, "no acceptable encoding; identity and gzip are supported")
		return
	}
	w.Header().Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	w.Header().Add("Vary", "Accept-Encoding")
	switch {
	case info.Size() == 0:
		sendUnsized(w, r, f, info, encoding)
	case encoding == "gzip":
		w.Header().Set("Last-Modified", info.ModTime().UTC().Format(http.TimeFormat))
		sendGzip(w, r, f)
	default:
		http.ServeContent(w, r, filepath.Base(path), info.ModTime(), f)
	}
}

func failFile(w http.ResponseWriter, err error, path string) {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		fail(w, http.StatusNotFound, fmt.Sprintf("path '%s' does not exist", path))
	case errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.EINVAL):
		fail(w, http.StatusBadRequest, err.Error())
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		fail(w, http.StatusInsufficientStorage, "not enough disk space available")
	default:
		fail(w, http.StatusInternalServerError, err.Error())
	}
}

// sendUnsized serves what claims to be empty: really empty files, and files of /proc and /sys, which do not know
// their size. An empty file must say Content-Length: 0; clients look at it.
func sendUnsized(w http.ResponseWriter, r *http.Request, f *os.File, info fs.FileInfo, encoding string) {
	w.Header().Set("Last-Modified", info.ModTime().UTC().Format(http.TimeFormat))
	first := make([]byte, 64<<10)
	n, err := io.ReadAtLeast(f, first, 1)
	if err != nil && !errors.Is(err, io.EOF) {
		w.Header().Del("Content-Disposition")
		failFile(w, err, f.Name())
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	if n == 0 {
		w.Header().Set("Content-Length", "0")
		return
	}
	if r.Method == http.MethodHead {
		return
	}
	rest := io.MultiReader(strings.NewReader(string(first[:n])), f)
	if encoding == "gzip" {
		sendGzip(w, r, rest)
		return
	}
	_, _ = io.CopyBuffer(onlyWriter{w}, rest, make([]byte, copyBuffer))
}

func sendGzip(w http.ResponseWriter, r *http.Request, body io.Reader) {
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "application/octet-stream")
	}
	w.Header().Set("Content-Encoding", "gzip")
	if r.Method == http.MethodHead {
		return
	}
	z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if _, err := io.CopyBuffer(z, body, make([]byte, copyBuffer)); err != nil {
		// The status is sent; only breaking the connection tells that the file is not complete.
		panic(http.ErrAbortHandler)
	}
	_ = z.Close()
}

type onlyWriter struct{ io.Writer }

// negotiate picks gzip only for a client that asks for nothing else: HTTP libraries list it by default, and on the
// way from a guest compressing costs more than it saves. Ranges and conditions need the plain bytes.
func negotiate(h http.Header) (encoding string, ok bool) {
	accepted := strings.Join(h.Values("Accept-Encoding"), ",")
	if strings.TrimSpace(accepted) == "" {
		return "identity", true
	}
	quality := map[string]float64{}
	for item := range strings.SplitSeq(accepted, ",") {
		name, params, _ := strings.Cut(item, ";")
		q := 1.0
		if v, found := strings.CutPrefix(strings.TrimSpace(params), "q="); found {
			if parsed, err := strconv.ParseFloat(v, 64); err == nil {
				q = parsed
			}
		}
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			quality[name] = q
		}
	}
	plain := h.Get("Range") != "" || h.Get("If-Range") != "" || h.Get("If-None-Match") != "" || h.Get("If-Match") != "" ||
		h.Get("If-Modified-Since") != "" || h.Get("If-Unmodified-Since") != ""
	identity, named := quality["identity"]
	if !named {
		identity = 1
		if star, has := quality["*"]; has {
			identity = star
		}
	}
	gzipOK := quality["gzip"] > 0 && !plain
	if gzipOK && (identity == 0 || len(quality) == 1) {
		return "gzip", true
	}
	return "identity", identity > 0
}

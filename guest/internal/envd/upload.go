package envd

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// An upload that brings nothing for this long is given up; clients set no time-out of their own.
	uploadIdle    = 2 * time.Minute
	maxMetadata   = 32 << 10
	metadataField = "X-Metadata-"
)

type writtenFile struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// httpError is an answer that is already decided.
type httpError struct {
	code    int
	message string
}

func (e *httpError) Error() string { return e.message }

func badRequest(format string, args ...any) error {
	return &httpError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

func (s *server) postFiles(w http.ResponseWriter, r *http.Request) {
	u, workdir, ok := s.fileTarget(w, r, "write")
	if !ok {
		return
	}
	s.state.waitSettled()
	up := &upload{u: u, workdir: workdir, path: r.URL.Query().Get("path"), hasPath: r.URL.Query().Has("path")}
	files, err := up.receive(w, r)
	if err == nil {
		reply(w, files)
		return
	}
	// What the client still sends is not read; the connection cannot be used again.
	w.Header().Set("Connection", "close")
	var known *httpError
	if errors.As(err, &known) {
		fail(w, known.code, known.message)
		return
	}
	failFile(w, err, up.path)
}

type upload struct {
	u        account
	workdir  string
	path     string
	hasPath  bool
	metadata map[string]string
}

func (up *upload) receive(w http.ResponseWriter, r *http.Request) ([]writtenFile, error) {
	var err error
	if up.metadata, err = metadataOf(r.Header); err != nil {
		return nil, err
	}
	var body io.Reader = &idleReader{body: r.Body, control: http.NewResponseController(w)}
	switch encoding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); encoding {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return nil, badRequest("body is not gzip: %v", err)
		}
		body = z
	default:
		return nil, badRequest("content encoding %q is not supported", encoding)
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, badRequest("content type is missing or malformed")
	}
	switch kind {
	case "application/octet-stream":
		if up.path == "" {
			return nil, badRequest("query parameter path is required for application/octet-stream")
		}
		file, err := up.write(up.path, body)
		if err != nil {
			return nil, err
		}
		return []writtenFile{file}, nil
	case "multipart/form-data":
		if params["boundary"] == "" {
			return nil, badRequest("multipart boundary is missing")
		}
		return up.receiveParts(multipart.NewReader(body, params["boundary"]))
	}
	return nil, badRequest("content type %q is not supported", kind)
}

func (up *upload) receiveParts(parts *multipart.Reader) ([]writtenFile, error) {
	files := []writtenFile{}
	for {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, badRequest("multipart body is broken: %v", err)
		}
		if part.FormName() != "file" {
			_ = part.Close()
			continue
		}
		path := up.path
		if !up.hasPath || path == "" {
			if path, err = partPath(part.Header.Get("Content-Disposition")); err != nil {
				return nil, err
			}
		} else if len(files) > 0 {
			return nil, badRequest("more than one file for one path")
		}
		file, err := up.write(path, part)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
}

// partPath gives the file name of a part with its directories, which the standard library would cut off.
func partPath(disposition string) (string, error) {
	_, params, err := mime.ParseMediaType(disposition)
	if err != nil || params["filename"] == "" {
		return "", badRequest("a file part has no file name")
	}
	return params["filename"], nil
}

func metadataOf(h http.Header) (map[string]string, error) {
	var out map[string]string
	size := 0
	for name, values := range h {
		if len(name) < len(metadataField) || !strings.EqualFold(name[:len(metadataField)], metadataField) {
			continue
		}
		key := strings.ToLower(name[len(metadataField):])
		if key == "" || len(metadataPrefix)+len(key) > 255 {
			return nil, badRequest("metadata key %q is not valid", key)
		}
		value := strings.Join(values, ", ")
		if size += len(key) + len(value); size > maxMetadata {
			return nil, badRequest("metadata is larger than %d bytes", maxMetadata)
		}
		if out == nil {
			out = map[string]string{}
		}
		out[key] = value
	}
	return out, nil
}

// bodyError is a failure of the client's side of the copy.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return e.err.Error() }
func (e *bodyError) Unwrap() error { return e.err }

type bodyReader struct{ r io.Reader }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && err != io.EOF {
		err = &bodyError{err}
	}
	return n, err
}

func (up *upload) write(raw string, body io.Reader) (writtenFile, error) {
	path, err := resolvePath(raw, up.u.home, up.workdir)
	if err != nil {
		return writtenFile{}, badRequest("%v", err)
	}
	if err := makeParents(filepath.Dir(path), up.u); err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			return writtenFile{}, badRequest("a parent of '%s' is not a directory", path)
		}
		return writtenFile{}, err
	}
	f, created, err := openForWrite(path, up.u)
	if err != nil {
		return writtenFile{}, err
	}
	err = up.fill(f, body)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		if created {
			_ = os.Remove(path)
		}
		var broken *bodyError
		if errors.As(err, &broken) {
			return writtenFile{}, badRequest("upload of '%s' broke off: %v", path, broken)
		}
		return writtenFile{}, err
	}
	return writtenFile{Name: filepath.Base(path), Path: path, Type: "file", Metadata: up.metadata}, nil
}

// openForWrite truncates what is there; a new file belongs to the user.
func openForWrite(path string, u account) (f *os.File, created bool, err error) {
	if st, err := os.Stat(path); err == nil {
		if st.IsDir() {
			return nil, false, badRequest("path '%s' is a directory", path)
		}
		if !st.Mode().IsRegular() {
			return nil, false, badRequest("path '%s' is not a regular file", path)
		}
	} else {
		created = true
	}
	f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, false, err
	}
	if err := own(f, u); err != nil {
		_ = f.Close()
		return nil, false, err
	}
	return f, created, nil
}

// own leaves a file alone that belongs to the user already: watchers would see a change that is none.
func own(f *os.File, u account) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid == u.uid && st.Gid == u.gid {
		return nil
	}
	return f.Chown(int(u.uid), int(u.gid))
}

func (up *upload) fill(f *os.File, body io.Reader) error {
	if err := writeMetadata(f, up.metadata); err != nil {
		// A file system without attributes takes files without metadata.
		if len(up.metadata) > 0 || !errors.Is(err, syscall.EOPNOTSUPP) {
			return err
		}
	}
	_, err := io.CopyBuffer(onlyWriter{f}, bodyReader{body}, make([]byte, copyBuffer))
	return err
}

// idleReader moves the read deadline of the connection ahead before every read.
type idleReader struct {
	body    io.Reader
	control *http.ResponseController
	next    time.Time
}

func (r *idleReader) Read(p []byte) (int, error) {
	if now := time.Now(); now.After(r.next) {
		// Not on every read: arming a timer costs more than a small read.
		_ = r.control.SetReadDeadline(now.Add(uploadIdle))
		r.next = now.Add(uploadIdle / 8)
	}
	n, err := r.body.Read(p)
	if err == io.EOF {
		_ = r.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

const maxComposeBody = 4 << 20

// postCompose concatenates files into one and deletes the sources.
func (s *server) postCompose(w http.ResponseWriter, r *http.Request) {
	var body struct {
		SourcePaths []string `json:"source_paths"`
		Destination string   `json:"destination"`
		Username    string   `json:"username"`
	}
	if err := json.NewDecoder(io.LimitReader(r.Body, maxComposeBody)).Decode(&body); err != nil {
		fail(w, http.StatusBadRequest, "invalid body: "+err.Error())
		return
	}
	if len(body.SourcePaths) == 0 || body.Destination == "" {
		fail(w, http.StatusBadRequest, "source_paths and destination are required")
		return
	}
	u, workdir, err := s.userFor(body.Username)
	if err != nil {
		fail(w, http.StatusUnauthorized, err.Error())
		return
	}
	file, err := compose(body.SourcePaths, body.Destination, u, workdir)
	var known *httpError
	switch {
	case errors.As(err, &known):
		fail(w, known.code, known.message)
	case err != nil:
		path := body.Destination
		var pathErr *os.PathError
		if errors.As(err, &pathErr) {
			path = pathErr.Path
		}
		failFile(w, err, path)
	default:
		reply(w, file)
	}
}

func compose(raw []string, destination string, u account, workdir string) (writtenFile, error) {
	target, err := resolvePath(destination, u.home, workdir)
	if err != nil {
		return writtenFile{}, badRequest("%v", err)
	}
	sources := make([]*os.File, 0, len(raw))
	defer func() {
		for _, f := range sources {
			_ = f.Close()
		}
	}()
	readers := make([]io.Reader, 0, len(raw))
	for _, p := range raw {
		path, err := resolvePath(p, u.home, workdir)
		if err != nil {
			return writtenFile{}, badRequest("%v", err)
		}
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return writtenFile{}, err
		}
		sources = append(sources, f)
		if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() || path == target {
			return writtenFile{}, badRequest("'%s' is not a regular file other than the destination", path)
		}
		readers = append(readers, f)
	}
	up := &upload{u: u, workdir: workdir}
	file, err := up.write(target, io.MultiReader(readers...))
	if err != nil {
		return file, err
	}
	for _, f := range sources {
		_ = os.Remove(f.Name())
	}
	return file, nil
}

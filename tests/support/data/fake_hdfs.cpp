// Hadoop's C library of HDFS (libhdfs), as far as pyarrow reads by it, over the local folder $FAKE_HDFS.
//
// Pyarrow's driver looks the functions up by name at run time, as in Hadoop's own library, whose habits are kept:
// names are whole URLs, an empty folder has no list and no error, reads may give less than was asked for.
// Folders are listed backwards, so that no reader may count on their order. Only the host `name` can be reached.

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int32_t most_at_once = 1000;

struct Builder {
  std::string host;
  int port = 0;
};

struct FileSystem {
  std::string root;
  std::string url;
};

struct FileInfo {  // hdfsFileInfo of hdfs.h
  int kind;        // 'F' or 'D'
  char* name;
  time_t modified;
  int64_t size;
  short replication;
  int64_t block_size;
  char* owner;
  char* group;
  short permissions;
  time_t accessed;
};

bool look(const FileSystem* system, const std::string& path, FileInfo* info) {
  struct stat status;
  if (stat((system->root + path).c_str(), &status) != 0) return false;
  *info = {};
  info->kind = S_ISDIR(status.st_mode) ? 'D' : 'F';
  info->name = strdup((system->url + path).c_str());
  info->owner = strdup("somebody");
  info->group = strdup("everybody");
  info->modified = status.st_mtime;
  info->size = status.st_size;
  return true;
}

int refuse() {
  errno = ENOTSUP;
  return -1;
}

}  // namespace

extern "C" {

Builder* hdfsNewBuilder() { return new Builder; }
void hdfsBuilderSetNameNode(Builder* builder, const char* host) { builder->host = host; }
void hdfsBuilderSetNameNodePort(Builder* builder, uint16_t port) { builder->port = port; }
void hdfsBuilderSetUserName(Builder*, const char*) {}
void hdfsBuilderSetKerbTicketCachePath(Builder*, const char*) {}
void hdfsBuilderSetForceNewInstance(Builder*) {}
int hdfsBuilderConfSetStr(Builder*, const char*, const char*) { return 0; }

FileSystem* hdfsBuilderConnect(Builder* builder) {
  const std::string url = builder->host + ":" + std::to_string(builder->port);
  delete builder;
  if (url == "hdfs://name:8020") return new FileSystem{getenv("FAKE_HDFS"), url};
  errno = ECONNREFUSED;
  return nullptr;
}

int hdfsDisconnect(FileSystem* system) {
  delete system;
  return 0;
}

char* hdfsGetWorkingDirectory(FileSystem* system, char* buffer, size_t size) {
  return strncpy(buffer, (system->url + "/user/somebody").c_str(), size);
}

int hdfsExists(FileSystem* system, const char* path) { return access((system->root + path).c_str(), F_OK); }

FileInfo* hdfsGetPathInfo(FileSystem* system, const char* path) {
  FileInfo info;
  if (!look(system, path, &info)) return nullptr;
  return static_cast<FileInfo*>(memcpy(malloc(sizeof info), &info, sizeof info));
}

FileInfo* hdfsListDirectory(FileSystem* system, const char* path, int* count) {
  DIR* folder = opendir((system->root + path).c_str());
  if (folder == nullptr) return nullptr;
  std::vector<std::string> names;
  while (dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(folder);
  std::sort(names.rbegin(), names.rend());
  *count = static_cast<int>(names.size());
  errno = 0;
  if (names.empty()) return nullptr;
  auto* infos = static_cast<FileInfo*>(calloc(names.size(), sizeof(FileInfo)));
  const std::string base = strcmp(path, "/") == 0 ? "" : path;
  for (size_t i = 0; i < names.size(); ++i) look(system, base + "/" + names[i], &infos[i]);
  return infos;
}

void hdfsFreeFileInfo(FileInfo* infos, int count) {
  for (int i = 0; i < count; ++i) {
    free(infos[i].name);
    free(infos[i].owner);
    free(infos[i].group);
  }
  free(infos);
}

int* hdfsOpenFile(FileSystem* system, const char* path, int flags, int, short, int32_t) {
  const int file = open((system->root + path).c_str(), flags);
  return file == -1 ? nullptr : new int(file);
}

int hdfsCloseFile(FileSystem*, int* file) {
  const int result = close(*file);
  delete file;
  return result;
}

int32_t hdfsRead(FileSystem*, int* file, void* to, int32_t size) {
  return static_cast<int32_t>(read(*file, to, std::min(size, most_at_once)));
}

int32_t hdfsPread(FileSystem*, int* file, int64_t from, void* to, int32_t size) {
  return static_cast<int32_t>(pread(*file, to, std::min(size, most_at_once), from));
}

int hdfsSeek(FileSystem*, int* file, int64_t to) { return lseek(*file, to, SEEK_SET) == -1 ? -1 : 0; }
int64_t hdfsTell(FileSystem*, int* file) { return lseek(*file, 0, SEEK_CUR); }

// What the driver wants to be there, though reading needs none of it.
int hdfsCreateDirectory() { return refuse(); }
int hdfsDelete() { return refuse(); }
int hdfsGetCapacity() { return refuse(); }
int hdfsGetUsed() { return refuse(); }
int hdfsChown() { return refuse(); }
int hdfsChmod() { return refuse(); }
int hdfsFlush() { return refuse(); }
int hdfsWrite() { return refuse(); }
}

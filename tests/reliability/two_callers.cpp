// two_callers FILE: two threads at once compute every case of native_cases.py, each call with threads of its own.

#define main one_caller
#include "../kernels/native_cases_main.cpp"
#undef main

#include <thread>

int main(int, char** arguments) {
    for (const std::string& set : available_isas()) {
        set_isa(set);  // of the process
        std::vector<std::thread> callers;
        for (int i = 0; i < 2; ++i) {
            callers.emplace_back([&] {
                for (Case& c : read_cases(arguments[1])) kOps.at(c.op)(c);
            });
        }
        for (std::thread& caller : callers) caller.join();
    }
    std::printf("native code is clean\n");
    return 0;
}
